// Attention of a chunk of queries over the pages of one lane, query rows PANEL at a time.
//
// Everything is transposed: scores are [slot][row], so that softmax runs down the columns, eight or sixteen rows at
// once, and keys and values are the broadcast side of both products. The query heads of one KV head are rows like its
// tokens. A row's result depends on nothing but the row and its panel's slots, in order: however panels are shared out
// to threads, the result is the same. Both products multiply floats, pairs of bfloat16, or pairs of 16-bit integers
// (integers.h); everything else is computed in floats.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "buffer.h"
#include "integers.h"
#include "page.h"
#include "slots.h"

constexpr float HIDDEN = -1e30f;
constexpr float LAG = 8;  // weights are 2^LAG at most: rescaling all sums for a smaller rise of the maximum does not pay

struct Queries {
  const void* q;  // [C, H, D] with strides in numbers; floats or bfloat16, as is the output
  bool bf16;
  int64_t token_stride, head_stride;
  int tokens, heads, group, dim;
  float scale;       // above 0
  void* out;         // [C, H, D]
  float* lse;        // [C, H]
  int64_t distance;  // only queries so many slots behind a slot count for the largest weight it gets
  bool rounds;       // numbers may be rounded to integers, where these are faster

  int rows() const { return tokens * group; }
  int panels() const { return (rows() + PANEL - 1) / PANEL; }
};

// Token i of the chunk's C sees all slots but the last C - 1 - i.
struct Lane {
  std::vector<Page> pages;  // none empty
  int64_t slots = 0;
  int64_t num_scored = 0;  // the last slots, whose largest weights are computed

  void add(const Page& page) {
    if (!page.count) return;
    pages.push_back(page);
    slots += page.count;
  }
};

template <class Kind>
class Prefill {
 public:
  Prefill(const Queries& queries) : in_(queries), factor_(queries.scale * LOG2E) {
    scores_.resize(TILE_SLOTS * PANEL);
  }

  // Panels [first, first + count) of a KV head's rows. The logarithms (base 2) of the largest weight that any of these
  // rows gave each of the scored slots go to `largest`.
  void run(const Lane& lane, int kv_head, int first, int count, float* largest) {
    kv_head_ = kv_head, first_ = first, count_ = count, hidden_ = lane.slots - in_.tokens;
    scored_ = lane.slots - lane.num_scored, num_scored_ = lane.num_scored;
    start();
    const int64_t end = hidden_ + token((first + count) * PANEL - 1) + 1;
    int64_t slot = 0;
    for (const Page& page : lane.pages)
      for (int t = 0; t < page.count && slot < end; t += TILE_SLOTS) {
        const int size = std::min<int64_t>({TILE_SLOTS, page.count - t, end - slot});
        if (INTEGERS && in_.rounds) {
          integers_.read(page, in_.dim, t, t + size);
          for (int panel = 0; panel < count; panel++) attend_rounded(panel, slot, size);
        } else {
          slots_.read(page, in_.dim, t, t + size);
          for (int panel = 0; panel < count; panel++) attend(panel, slot, size);
        }
        slot += size;
      }
    finish();
    if (num_scored_) find_largest(largest);
  }

 private:
  using Element = typename Kind::Element;
  static constexpr bool INTEGERS = HAS_INTEGERS && Kind::STEP == 1;  // pairs of bfloat16 are as fast

  int token(int row) const { return std::min(row / in_.group, in_.tokens - 1); }

  Element* query(int panel) { return query_.data() + (int64_t)panel * (in_.dim / Kind::STEP) * PANEL; }
  float* out(int panel) { return out_.data() + (int64_t)panel * in_.dim * PANEL; }
  float* max(int panel) { return max_.data() + panel * PANEL; }
  float* sum(int panel) { return sum_.data() + panel * PANEL; }
  uint32_t* pairs(int panel) { return pairs_.data() + (int64_t)panel * (in_.dim / 2) * PANEL; }
  float* factor(int panel) { return factors_.data() + panel * PANEL; }
  float* minimum(int panel) { return minima_.data() + panel * PANEL; }
  float* kept(int panel, int64_t slot) { return kept_.data() + (panel * num_scored_ + slot - scored_) * PANEL; }

  void start() {
    out_.resize((size_t)count_ * in_.dim * PANEL);
    max_.resize(count_ * PANEL);
    sum_.resize(count_ * PANEL);
    minima_.resize(count_ * PANEL);
    kept_.resize(count_ * num_scored_ * PANEL);
    std::fill(out(0), out(count_), 0.f);
    std::fill(max(0), max(count_), HIDDEN);
    std::fill(sum(0), sum(count_), 0.f);
    std::fill(minimum(0), minimum(count_), 0.f);
    if constexpr (INTEGERS)
      if (in_.rounds) return round_queries();
    read_queries();
  }

  const void* query_row(int token, int head) const {
    const int64_t at = token * in_.token_stride + head * in_.head_stride;
    return (const char*)in_.q + at * (in_.bf16 ? 2 : 4);
  }

  // Queries as columns; columns without a row are zero.
  void read_queries() {
    const int depth = in_.dim / Kind::STEP;
    query_.resize((size_t)count_ * depth * PANEL);
    std::fill(query(0), query(count_), Element());
    for_rows([&](int panel, int column, int token, int head) {
      const void* q = query_row(token, head);
      Element* to = query(panel) + column;
      for (int k = 0; k < depth; k++) to[k * PANEL] = Kind::read(q, in_.bf16, k);
    });
  }

  // The same as integers.
  void round_queries() {
    const int depth = in_.dim / 2;
    pairs_.resize((size_t)count_ * depth * PANEL);
    factors_.resize(count_ * PANEL);
    row_.resize(in_.dim), words_.resize(depth);
    std::fill(pairs(0), pairs(count_), 0);
    std::fill(factor(0), factor(count_), 0.f);
    for_rows([&](int panel, int column, int token, int head) {
      const void* q = query_row(token, head);
      for (int d = 0; d < in_.dim; d++) row_.data()[d] = Kind::read(q, in_.bf16, d);
      factor(panel)[column] = round_row(row_.data(), in_.dim, (int16_t*)words_.data());
      for (int k = 0; k < depth; k++) pairs(panel)[k * PANEL + column] = words_.data()[k];
    });
  }

  void finish() {
    for_rows([&](int panel, int column, int token, int head) {
      const int64_t row = (int64_t)token * in_.heads + head;
      const float* from = out(panel) + column;
      const float factor = 1 / sum(panel)[column], minimum = this->minimum(panel)[column];
      for (int d = 0; d < in_.dim; d += 8) {
        f32x8 x;
        for (int i = 0; i < 8; i++) x[i] = (from[(d + i) * PANEL] + minimum) * factor;
        if (in_.bf16)
          store_bf16((uint16_t*)in_.out + row * in_.dim + d, x);
        else
          store((float*)in_.out + row * in_.dim + d, x);
      }
      in_.lse[row] = (max(panel)[column] * factor_ + std::log2(sum(panel)[column])) * LN2;
    });
  }

  template <class Use>
  void for_rows(Use use) {
    for (int panel = 0; panel < count_; panel++)
      for (int column = 0; column < PANEL; column++) {
        const int row = (first_ + panel) * PANEL + column;
        if (row < in_.rows()) use(panel, column, row / in_.group, kv_head_ * in_.group + row % in_.group);
      }
  }

  // Not inlined, nor is `attend_rounded`: each needs all registers.
  [[gnu::noinline]] void attend(int panel, int64_t slot, int size) {
    size = num_seen(panel, slot, size);
    if (size <= 0) return;
    float* scores = slot < scored_ ? scores_.data() : kept(panel, slot);
    alignas(64) float best[PANEL];
    std::copy(max(panel), max(panel + 1), best);
    const int dim = in_.dim, depth = dim / Kind::STEP;
    product<Kind, false>(slots_.keys, depth, 1, size, query(panel), depth, scores, best);
    hide(panel, slot, size, max(panel), scores, best);
    Element* weights = (Element*)scores_.data();  // element k is made of scores STEP * k and later ones
    soften(panel, size, scores, best, weights);
    product<Kind, true>(slots_.values, 1, dim, dim, weights, (size + Kind::STEP - 1) / Kind::STEP, out(panel), nullptr);
  }

  // The same in integers. Weights are rounded by the largest of these slots alone, however small beside others it is.
  [[gnu::noinline]] void attend_rounded(int panel, int64_t slot, int size) {
    size = num_seen(panel, slot, size);
    if (size <= 0) return;
    float* scores = slot < scored_ ? scores_.data() : kept(panel, slot);
    alignas(64) float lowest[PANEL], best[PANEL], factors[PANEL];
    std::fill(lowest, lowest + PANEL, HIDDEN / 2);  // above the hidden, which so weigh nothing where a row sees none
    std::copy(lowest, lowest + PANEL, best);
    const int dim = in_.dim;
    integer_product<false>(integers_.keys, dim / 2, 1, size, pairs(panel), dim / 2, scores, factor(panel),
                           integers_.key_factors, best);
    hide(panel, slot, size, lowest, scores, best);
    uint32_t* weights = (uint32_t*)scores_.data();  // a pair is made of two slots' scores, and comes before them
    soften_rounded(panel, slot, size, scores, best, weights, factors);
    integer_product<true>(integers_.values, 1, dim, dim, weights, (size + 1) / 2, out(panel), factors);
  }

  // How many of a tile's slots a panel's last row sees, and with it any row.
  int num_seen(int panel, int64_t slot, int size) const {
    return std::min<int64_t>(size, hidden_ + token((first_ + panel + 1) * PANEL - 1) + 1 - slot);
  }

  // Whether all of a panel's rows see them.
  bool all_seen(int panel, int64_t slot, int size) const {
    return hidden_ + token((first_ + panel) * PANEL) + 1 - slot >= size;
  }

  // Hides slots that some of a panel's rows must not see. Their scores in the maximum would make the weights of visible
  // slots underflow. `before` are the largest scores of earlier slots.
  void hide(int panel, int64_t slot, int size, const float* before, float* scores, float* best) {
    if (all_seen(panel, slot, size)) return;
    for (int j = 0; j < PANEL; j += WIDE) {
      WideInt seen;
      for (int i = 0; i < WIDE; i++) seen[i] = hidden_ + token((first_ + panel) * PANEL + j + i) + 1 - slot;
      Wide most = load_wide(before + j);
      for (int t = 0; t < size; t++) {
        float* s = scores + t * PANEL + j;
        const Wide score = seen > t ? load_wide(s) : wide(HIDDEN);
        most = larger_of(most, score);
        store_wide(s, score);
      }
      store_wide(best + j, most);
    }
  }

  // Returns a panel's maximum in log2, the new one where that is much larger.
  Wide raised(int panel, int j, const float* largest) {
    const Wide before = load_wide(max(panel) + j * WIDE), most = load_wide(largest + j * WIDE);
    return any_larger((most - before) * factor_, wide(LAG)) ? raise(panel, j, before, most) : before * factor_;
  }

  // Brings sums and output to the new maximum where it is much larger. Not inlined, since it is rare.
  [[gnu::noinline]] Wide raise(int panel, int j, Wide before, Wide most) {
    const Wide now = (most - before) * factor_ > LAG ? most : before, decay = fast_exp2((before - now) * factor_);
    store_wide(max(panel) + j * WIDE, now);
    for (float* sums : {sum(panel) + j * WIDE, minimum(panel) + j * WIDE}) store_wide(sums, load_wide(sums) * decay);
    float* o = out(panel) + j * WIDE;
    for (int d = 0; d < in_.dim; d++) store_wide(o + d * PANEL, load_wide(o + d * PANEL) * decay);
    return now * factor_;
  }

  // Turns scores into weights.
  void soften(int panel, int size, const float* scores, const float* largest, Element* weights) {
    float* sum = this->sum(panel);
    const Wide factor = wide(factor_);
    Wide best[TILE_VECTORS], total[TILE_VECTORS];
    for (int j = 0; j < TILE_VECTORS; j++) {
      best[j] = raised(panel, j, largest);
      total[j] = load_wide(sum + j * WIDE);
    }
    for (int t = 0; t < size; t += Kind::STEP)
#pragma GCC unroll 3
      for (int j = 0; j < TILE_VECTORS; j++) {
        Wide weight[Kind::STEP] = {};
        for (int i = 0; i < Kind::STEP && t + i < size; i++) {
          weight[i] = Kind::exp2(load_wide(scores + (t + i) * PANEL + j * WIDE) * factor - best[j]);
          total[j] += weight[i];
        }
        store_wide(weights + t / Kind::STEP * PANEL + j * WIDE, Kind::join(weight));
      }
    for (int j = 0; j < TILE_VECTORS; j++) store_wide(sum + j * WIDE, total[j]);
  }

  // Turns scores into integers: weights times their values' scales, the largest of a row as large as may be. What undoes
  // that goes to `factors`.
  void soften_rounded(int panel, int64_t slot, int size, const float* scores, const float* largest, uint32_t* weights,
                      float* factors) {
    const Wide factor = wide(factor_);
    const float *scales = integers_.scales, *minima = integers_.minima;
    Wide best[TILE_VECTORS], total[TILE_VECTORS] = {}, minimum[TILE_VECTORS] = {};
    for (int j = 0; j < TILE_VECTORS; j++) {
      best[j] = load_wide(largest + j * WIDE) * factor - room(panel, j, slot, size);
      store_wide(factors + j * WIDE, fast_exp2(best[j] - raised(panel, j, largest)));
    }
    for (int t = 0; t < size; t += 2)
#pragma GCC unroll 3
      for (int j = 0; j < TILE_VECTORS; j++) {
        WideInt words[2] = {};
        for (int i = 0; i < 2 && t + i < size; i++) {
          const Wide weight = fast_exp2(load_wide(scores + (t + i) * PANEL + j * WIDE) * factor - best[j]);
          total[j] += weight;
          minimum[j] += weight * minima[t + i];
          words[i] = __builtin_convertvector(weight * scales[t + i] + 0.5f, WideInt);
        }
        store_wide(weights + t / 2 * PANEL + j * WIDE, (Wide)(words[0] | words[1] << 16));
      }
    for (int j = 0; j < TILE_VECTORS; j++) {
      const Wide share = load_wide(factors + j * WIDE);
      float *sum = this->sum(panel) + j * WIDE, *low = this->minimum(panel) + j * WIDE;
      store_wide(sum, load_wide(sum) + total[j] * share);
      store_wide(low, load_wide(low) + minimum[j] * share);
    }
  }

  // The room of the slots that each row sees.
  Wide room(int panel, int j, int64_t slot, int size) const {
    if (all_seen(panel, slot, size)) return wide(integers_.room[size - 1]);
    Wide room;
    for (int i = 0; i < WIDE; i++) {
      const int64_t seen = hidden_ + token((first_ + panel) * PANEL + j * WIDE + i) + 1 - slot;
      room[i] = integers_.room[std::clamp<int64_t>(seen, 1, size) - 1];
    }
    return room;
  }

  // A slot's weight is known only at the end, when all its rows' sums are: until then the scores were kept.
  void find_largest(float* largest) {
    for (int i = 0; i < count_ * PANEL; i++) sum(0)[i] = max(0)[i] * factor_ + std::log2(sum(0)[i]);
    for (int64_t n = 0; n < num_scored_; n++) {
      // Rows from this one on are far enough behind.
      const int64_t far = (scored_ + n + in_.distance - hidden_) * in_.group;
      Wide best = wide(HIDDEN);
      for (int64_t panel = std::max<int64_t>(0, far / PANEL - first_); panel < count_; panel++) {
        const int64_t row = (first_ + panel) * PANEL;
        const float *s = kept(panel, scored_ + n), *lse = sum(panel);
        if (row >= far && row + PANEL <= in_.rows()) {
          for (int j = 0; j < PANEL; j += WIDE) best = larger_of(best, load_wide(s + j) * factor_ - load_wide(lse + j));
        } else {
          for (int column = std::max<int64_t>(0, far - row); column < PANEL && row + column < in_.rows(); column++)
            best[0] = std::max(best[0], s[column] * factor_ - lse[column]);
        }
      }
      largest[n] = largest_of(best);
    }
  }

  const Queries& in_;
  const float factor_;  // makes powers of two of products of query and key
  Slots<Kind> slots_;
  IntegerSlots integers_;
  int kv_head_ = 0, first_ = 0, count_ = 0;
  int64_t hidden_ = 0;  // slots before the chunk's own: token i sees hidden_ + i + 1
  int64_t scored_ = 0, num_scored_ = 0;
  Buffer<Element> query_;
  Buffer<float> out_, max_, sum_, scores_, kept_;
  Buffer<uint32_t> pairs_, words_;  // queries as integers
  Buffer<float> factors_, row_;     // what undoes their rounding
  Buffer<float> minima_;            // sums of weights times values' minima, the same for all channels
};
