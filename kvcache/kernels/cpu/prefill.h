// Attention of a chunk of queries over the pages of one lane, query rows PANEL at a time.
//
// Everything is transposed: scores are [slot][row], so that softmax runs down the columns, eight or sixteen rows at
// once, and keys and values are the broadcast side of both products. The query heads of one KV head are rows like its
// tokens. A row's result depends on nothing but the row and its panel's slots, in order: however panels are shared out
// to threads, the result is the same. Both products are of floats, or of pairs of bfloat16; all else is floats.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "buffer.h"
#include "page.h"
#include "slots.h"

constexpr int TILE_SLOTS = 64;  // scores of a tile and a panel, 6 KB on AVX2, stay in the first-level cache
constexpr float HIDDEN = -1e30f;
constexpr float LAG = 8;  // weights are 2^LAG at most: a smaller new maximum is not worth bringing all sums to it

struct Queries {
  const void* q;  // [C, H, D] with strides in numbers; floats or bfloat16, as is the output
  bool bf16;
  int64_t token_stride, head_stride;
  int tokens, heads, group, dim;
  float scale;       // above 0
  void* out;         // [C, H, D]
  float* lse;        // [C, H]
  int64_t distance;  // only queries so many slots behind a slot count for the largest weight it gets

  int rows() const { return tokens * group; }
  int panels() const { return (rows() + PANEL - 1) / PANEL; }
};

// Token i of the chunk's C sees all slots but the last C - 1 - i.
struct Lane {
  std::vector<Page> pages;  // none empty
  int64_t slots = 0;
  int64_t num_judged = 0;  // of the last so many slots the largest weight is wanted

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
  // rows gave each of the judged slots go to `largest`.
  void run(const Lane& lane, int kv_head, int first, int count, float* largest) {
    kv_head_ = kv_head, first_ = first, count_ = count, hidden_ = lane.slots - in_.tokens;
    judged_ = lane.slots - lane.num_judged, num_judged_ = lane.num_judged;
    start();
    const int64_t end = hidden_ + token((first + count) * PANEL - 1) + 1;
    int64_t slot = 0;
    for (const Page& page : lane.pages)
      for (int t = 0; t < page.count && slot < end; t += TILE_SLOTS) {
        const int size = std::min<int64_t>({TILE_SLOTS, page.count - t, end - slot});
        slots_.read(page, in_.dim, t, t + size);
        for (int panel = 0; panel < count; panel++) attend(panel, slot, size);
        slot += size;
      }
    finish();
    if (num_judged_) judge(largest);
  }

 private:
  using Element = typename Kind::Element;

  int token(int row) const { return std::min(row / in_.group, in_.tokens - 1); }

  Element* query(int panel) { return query_.data() + (int64_t)panel * (in_.dim / Kind::STEP) * PANEL; }
  float* out(int panel) { return out_.data() + (int64_t)panel * in_.dim * PANEL; }
  float* max(int panel) { return max_.data() + panel * PANEL; }
  float* sum(int panel) { return sum_.data() + panel * PANEL; }
  float* kept(int panel, int64_t slot) { return kept_.data() + (panel * num_judged_ + slot - judged_) * PANEL; }

  // Queries as columns; columns without a row are zero.
  void start() {
    const int depth = in_.dim / Kind::STEP;
    query_.resize((size_t)count_ * depth * PANEL);
    out_.resize((size_t)count_ * in_.dim * PANEL);
    max_.resize(count_ * PANEL);
    sum_.resize(count_ * PANEL);
    kept_.resize(count_ * num_judged_ * PANEL);
    std::fill(query(0), query(count_), Element());
    std::fill(out(0), out(count_), 0.f);
    std::fill(max(0), max(count_), HIDDEN);
    std::fill(sum(0), sum(count_), 0.f);
    for_rows([&](int panel, int column, int token, int head) {
      const int64_t at = token * in_.token_stride + head * in_.head_stride;
      const char* q = (const char*)in_.q + at * (in_.bf16 ? 2 : 4);
      Element* to = query(panel) + column;
      for (int k = 0; k < depth; k++) to[k * PANEL] = Kind::read(q, in_.bf16, k);
    });
  }

  void finish() {
    for_rows([&](int panel, int column, int token, int head) {
      const int64_t row = (int64_t)token * in_.heads + head;
      const float* from = out(panel) + column;
      const float factor = 1 / sum(panel)[column];
      for (int d = 0; d < in_.dim; d += 8) {
        f32x8 x;
        for (int i = 0; i < 8; i++) x[i] = from[(d + i) * PANEL] * factor;
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

  void attend(int panel, int64_t slot, int size) {
    const int row = (first_ + panel) * PANEL, dim = in_.dim;
    size = std::min<int64_t>(size, hidden_ + token(row + PANEL - 1) + 1 - slot);
    if (size <= 0) return;
    const bool whole = hidden_ + token(row) + 1 - slot >= size;
    float* scores = slot < judged_ ? scores_.data() : kept(panel, slot);
    alignas(64) float best[PANEL];
    std::copy(max(panel), max(panel + 1), best);
    const int depth = dim / Kind::STEP;
    product<Kind, false>(slots_.keys, depth, 1, size, query(panel), depth, scores, best);
    if (!whole) hide(panel, slot, size, scores, best);
    Element* weights = (Element*)scores_.data();  // element k is made of scores STEP * k and later ones
    soften(panel, size, scores, best, weights);
    product<Kind, true>(slots_.values, 1, dim, dim, weights, (size + Kind::STEP - 1) / Kind::STEP, out(panel), nullptr);
  }

  // Takes back what a panel's rows must not see: it would also push what they see below what an exponential can tell.
  void hide(int panel, int64_t slot, int size, float* scores, float* best) {
    for (int j = 0; j < PANEL; j += WIDE) {
      WideInt seen;
      for (int i = 0; i < WIDE; i++) seen[i] = hidden_ + token((first_ + panel) * PANEL + j + i) + 1 - slot;
      Wide most = load_wide(max(panel) + j);
      for (int t = 0; t < size; t++) {
        float* s = scores + t * PANEL + j;
        const Wide score = seen > t ? load_wide(s) : wide(HIDDEN);
        most = larger_of(most, score);
        store_wide(s, score);
      }
      store_wide(best + j, most);
    }
  }

  // Turns scores into weights, and brings sum and output to the new maximum where it is much larger.
  void soften(int panel, int size, const float* scores, const float* largest, Element* weights) {
    float *max = this->max(panel), *sum = this->sum(panel);
    const Wide factor = wide(factor_);
    Wide best[TILE_VECTORS], total[TILE_VECTORS];
    for (int j = 0; j < TILE_VECTORS; j++) {
      const Wide before = load_wide(max + j * WIDE), most = load_wide(largest + j * WIDE);
      const Wide rise = (most - before) * factor;
      best[j] = before * factor;
      total[j] = load_wide(sum + j * WIDE);
      if (!any_larger(rise, wide(LAG))) continue;
      const Wide now = rise > LAG ? most : before;
      best[j] = now * factor;
      const Wide decay = fast_exp2(before * factor - best[j]);
      store_wide(max + j * WIDE, now);
      total[j] *= decay;
      float* o = out(panel) + j * WIDE;
      for (int d = 0; d < in_.dim; d++) store_wide(o + d * PANEL, load_wide(o + d * PANEL) * decay);
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

  // A slot's weight is known only at the end, when all its rows' sums are: until then the scores were kept.
  void judge(float* largest) {
    for (int i = 0; i < count_ * PANEL; i++) sum(0)[i] = max(0)[i] * factor_ + std::log2(sum(0)[i]);
    for (int64_t n = 0; n < num_judged_; n++) {
      // Rows from this one on are far enough behind.
      const int64_t far = (judged_ + n + in_.distance - hidden_) * in_.group;
      Wide best = wide(HIDDEN);
      for (int64_t panel = std::max<int64_t>(0, far / PANEL - first_); panel < count_; panel++) {
        const int64_t row = (first_ + panel) * PANEL;
        const float *s = kept(panel, judged_ + n), *lse = sum(panel);
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
  int kv_head_ = 0, first_ = 0, count_ = 0;
  int64_t hidden_ = 0;  // slots before the chunk's own: token i sees hidden_ + i + 1
  int64_t judged_ = 0, num_judged_ = 0;
  Buffer<Element> query_;
  Buffer<float> out_, max_, sum_, scores_, kept_;
};
