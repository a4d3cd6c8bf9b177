// Attention of a chunk of queries over the pages of one lane, query rows PANEL at a time.
//
// Everything is transposed: scores are [slot][row], so that softmax runs down the columns, eight or sixteen rows at
// once, and keys and values are the broadcast side of both products, read as they lie in their pages. The query heads
// of one KV head are rows like its tokens. A row's result depends on nothing but the row and its panel's slots, in
// order: however panels are shared out to threads, the result is the same.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "page.h"
#include "unpack.h"
#include "wide.h"

constexpr int TILE_SLOTS = 64;  // scores of a tile and a panel, 6 KB on AVX2, stay in the first-level cache
constexpr float HIDDEN = -1e30f;

struct Queries {
  const float* q;  // [C, H, D] with strides in floats
  int64_t token_stride, head_stride;
  int tokens, heads, group, dim;
  float scale;
  float *out, *lse;   // [C, H, D] and [C, H]
  int64_t distance;   // only queries so many slots behind a slot count for the largest weight it gets

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

// Floats that start at a cache line.
class Buffer {
 public:
  void resize(size_t count) { lines_.resize((count + 15) / 16); }
  float* data() { return lines_.empty() ? nullptr : lines_[0].x; }

 private:
  struct alignas(64) Line {
    float x[16];
  };
  std::vector<Line> lines_;
};

class Prefill {
 public:
  Prefill(const Queries& queries) : in_(queries) { scores_.resize(TILE_SLOTS * PANEL); }

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
        const float *keys, *values;
        read(page, t, t + size, keys, values);
        for (int panel = 0; panel < count; panel++) attend(panel, keys, values, slot, size);
        slot += size;
      }
    finish();
    if (num_judged_) judge(largest);
  }

 private:
  int token(int row) const { return std::min(row / in_.group, in_.tokens - 1); }

  float* query(int panel) { return query_.data() + (int64_t)panel * in_.dim * PANEL; }
  float* out(int panel) { return out_.data() + (int64_t)panel * in_.dim * PANEL; }
  float* max(int panel) { return max_.data() + panel * PANEL; }
  float* sum(int panel) { return sum_.data() + panel * PANEL; }
  float* kept(int panel, int64_t slot) { return kept_.data() + (panel * num_judged_ + slot - judged_) * PANEL; }

  // Queries as columns, in units of log2; columns without a row are zero.
  void start() {
    const int dim = in_.dim;
    query_.resize((size_t)count_ * dim * PANEL);
    out_.resize((size_t)count_ * dim * PANEL);
    max_.resize(count_ * PANEL);
    sum_.resize(count_ * PANEL);
    kept_.resize(count_ * num_judged_ * PANEL);
    std::fill(query_.data(), query_.data() + (size_t)count_ * dim * PANEL, 0.f);
    std::fill(out_.data(), out_.data() + (size_t)count_ * dim * PANEL, 0.f);
    std::fill(max(0), max(count_), HIDDEN);
    std::fill(sum(0), sum(count_), 0.f);
    for_rows([&](int panel, int column, int token, int head) {
      const float* q = in_.q + token * in_.token_stride + head * in_.head_stride;
      float* to = query(panel) + column;
      for (int d = 0; d < dim; d++) to[d * PANEL] = q[d] * (in_.scale * LOG2E);
    });
  }

  void finish() {
    for_rows([&](int panel, int column, int token, int head) {
      const int64_t at = (int64_t)token * in_.heads + head;
      const float* from = out(panel) + column;
      const float factor = 1 / sum(panel)[column];
      for (int d = 0; d < in_.dim; d++) in_.out[at * in_.dim + d] = from[d * PANEL] * factor;
      in_.lse[at] = (max(panel)[column] + std::log2(sum(panel)[column])) * LN2;
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

  // Whole float32 pages are used where they are.
  void read(const Page& page, int first, int last, const float*& keys, const float*& values) {
    const int dim = in_.dim;
    const Format& f = *page.format;
    if (f.key_bits == 16 && f.whole_bytes == 4) {
      keys = (const float*)page.keys + (int64_t)first * dim;
      values = (const float*)page.values + (int64_t)first * dim;
      return;
    }
    keys_.resize(TILE_SLOTS * dim);
    values_.resize(TILE_SLOTS * dim);
    float *k = keys_.data(), *v = values_.data();
    unpack_.keys(page, dim, first, last, [&](int t, int d, f32x8 x) { store(k + (t - first) * dim + d, x); });
    unpack_.values(page, dim, first, last, [&](int t, int d, f32x8 x) { store(v + (t - first) * dim + d, x); });
    keys = k, values = v;
  }

  void attend(int panel, const float* keys, const float* values, int64_t slot, int size) {
    const int row = (first_ + panel) * PANEL, dim = in_.dim;
    size = std::min<int64_t>(size, hidden_ + token(row + PANEL - 1) + 1 - slot);
    if (size <= 0) return;
    const bool whole = hidden_ + token(row) + 1 - slot >= size;
    float* scores = slot < judged_ ? scores_.data() : kept(panel, slot);
    alignas(64) float best[PANEL];
    std::copy(max(panel), max(panel + 1), best);
    product<false>(keys, dim, 1, size, query(panel), dim, scores, best);
    if (!whole) hide(panel, slot, size, scores, best);
    soften(panel, size, scores, best, scores_.data());
    product<true>(values, 1, dim, dim, scores_.data(), size, out(panel), nullptr);
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

  // Turns scores into weights, and brings sum and output to the new maximum where there is one.
  void soften(int panel, int size, const float* scores, const float* largest, float* weights) {
    float *max = this->max(panel), *sum = this->sum(panel);
    Wide best[TILE_VECTORS], total[TILE_VECTORS];
    for (int j = 0; j < TILE_VECTORS; j++) {
      best[j] = load_wide(largest + j * WIDE);
      const Wide before = load_wide(max + j * WIDE);
      total[j] = load_wide(sum + j * WIDE);
      if (!any(best[j] > before)) continue;
      const Wide decay = fast_exp2(before - best[j]);
      store_wide(max + j * WIDE, best[j]);
      total[j] *= decay;
      float* o = out(panel) + j * WIDE;
      for (int d = 0; d < in_.dim; d++) store_wide(o + d * PANEL, load_wide(o + d * PANEL) * decay);
    }
    for (int t = 0; t < size; t++)
#pragma GCC unroll 3
      for (int j = 0; j < TILE_VECTORS; j++) {
        const Wide weight = fast_exp2(load_wide(scores + t * PANEL + j * WIDE) - best[j]);
        total[j] += weight;
        store_wide(weights + t * PANEL + j * WIDE, weight);
      }
    for (int j = 0; j < TILE_VECTORS; j++) store_wide(sum + j * WIDE, total[j]);
  }

  // A slot's weight is known only at the end, when all its rows' sums are: until then the scores were kept.
  void judge(float* largest) {
    for (int i = 0; i < count_ * PANEL; i++) sum(0)[i] = max(0)[i] + std::log2(sum(0)[i]);
    for (int64_t n = 0; n < num_judged_; n++) {
      // Rows from this one on are far enough behind.
      const int64_t far = (judged_ + n + in_.distance - hidden_) * in_.group;
      Wide best = wide(HIDDEN);
      for (int64_t panel = std::max<int64_t>(0, far / PANEL - first_); panel < count_; panel++) {
        const int64_t row = (first_ + panel) * PANEL;
        const float *s = kept(panel, judged_ + n), *lse = sum(panel);
        if (row >= far && row + PANEL <= in_.rows()) {
          for (int j = 0; j < PANEL; j += WIDE) best = larger_of(best, load_wide(s + j) - load_wide(lse + j));
        } else {
          for (int column = std::max<int64_t>(0, far - row); column < PANEL && row + column < in_.rows(); column++)
            best[0] = std::max(best[0], s[column] - lse[column]);
        }
      }
      largest[n] = largest_of(best);
    }
  }

  const Queries& in_;
  Unpack unpack_;
  int kv_head_ = 0, first_ = 0, count_ = 0;
  int64_t hidden_ = 0;  // slots before the chunk's own: token i sees hidden_ + i + 1
  int64_t judged_ = 0, num_judged_ = 0;
  Buffer query_, out_, max_, sum_, scores_, kept_, keys_, values_;
};
