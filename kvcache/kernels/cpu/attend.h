// Attention of the G query heads of one KV head over a few pages of one lane.
//
// Scales never touch the codes: a key channel's scale goes into the query once per page, its minimum into one number
// per query; a value token's scale goes into its softmax weight. So a page is read as codes, once, in registers.
#pragma once
#include <algorithm>
#include <vector>

#include "codes.h"
#include "page.h"

// Up to four query heads share one unpacking of the codes: more do not fit the 16 registers of AVX2.
constexpr int MAX_HEADS = 4;

// What will be read next: memory is asked for it, some bytes per token, while the arithmetic is busy.
struct Soon {
  const uint8_t* start;
  int token_bytes;
};

// scores[g * stride + t] = q[g] . codes[t], for t < count; up to the next multiple of 8 whatever.
template <class Codes, int G>
static void score(const uint8_t* codes, int count, int dim, const float* q, float* scores, int stride, Soon soon) {
  const int row_bytes = Codes::row_bytes(dim);
  for (int t0 = 0; t0 < count; t0 += 8) {
    f32x8 sums[G][8];
    for (int t = t0; t < t0 + 8; t++) {
      for (int b = 0; b < soon.token_bytes; b += 64) __builtin_prefetch(soon.start + t * soon.token_bytes + b);
      const uint8_t* row = codes + (int64_t)std::min(t, count - 1) * row_bytes;
      f32x8 low[G] = {}, high[G] = {};
      for (int u = 0; u < dim / 16; u++) {
        f32x8 a, b;
        Codes::read(row, dim, u, a, b);
        for (int g = 0; g < G; g++) {
          low[g] += a * load(q + g * dim + 16 * u);
          high[g] += b * load(q + g * dim + 16 * u + 8);
        }
      }
      for (int g = 0; g < G; g++) sums[g][t - t0] = low[g] + high[g];
    }
    for (int g = 0; g < G; g++) store(scores + g * stride + t0, sum_each(sums[g]));
  }
}

// out[g] = out[g] * decay[g] + sum over t of weights[g * stride + t] * codes[t]
template <class Codes, int G>
static void accumulate(const uint8_t* codes, int count, int dim, const float* weights, int stride, const float* decay,
                       float* out) {
  const int row_bytes = Codes::row_bytes(dim);
  for (int u = 0; u < dim / 16; u++) {
    f32x8 low[G] = {}, high[G] = {};
    for (int t = 0; t < count; t++) {
      f32x8 a, b;
      Codes::read(codes + (int64_t)t * row_bytes, dim, u, a, b);
      for (int g = 0; g < G; g++) {
        low[g] += a * weights[g * stride + t];
        high[g] += b * weights[g * stride + t];
      }
    }
    for (int g = 0; g < G; g++) {
      float* o = out + g * dim + 16 * u;
      store(o, load(o) * decay[g] + low[g]);
      store(o + 8, load(o + 8) * decay[g] + high[g]);
    }
  }
}

// Online softmax over the pages of one work unit.
class Attention {
 public:
  Attention(int heads, int dim, int page_tokens)
      : heads_(heads), dim_(dim), stride_(round_up(page_tokens)), query_(heads * dim), scaled_(heads * dim),
        scores_(heads * stride_), scales_(std::max(dim, stride_)), minima_(std::max(dim, stride_)), decay_(heads),
        bias_(heads) {}

  // Starts anew. out [G, D], max [G], sum [G] are the caller's and hold the partial result after `add`s and `finish`:
  // out is not divided by sum; max is in units of log2.
  void start(const float* q, float scale, float* out, float* max, float* sum) {
    for (int i = 0; i < heads_ * dim_; i++) query_[i] = q[i] * (scale * LOG2E);
    out_ = out, max_ = max, sum_ = sum;
    std::fill(out, out + heads_ * dim_, 0.f);
    std::fill(max, max + heads_, -1e30f);
    std::fill(sum, sum + heads_, 0.f);
    minimum_.assign(heads_, 0.f);
  }

  // Adds a page. With `kept`, scores in units of log2 are left there, heads `kept_stride` apart. `next` may be null.
  void add(const Page& page, const Page* next, float* kept, int64_t kept_stride) {
    const Format& f = *page.format;
    const float* q = f.key_scales < 0 ? query_.data() : fold_key_scales(page);
    with_codes(f.key_bits, f.whole_bytes, [&](auto codes) {
      using Codes = decltype(codes);
      for_heads([&](auto group, int g) {
        score<Codes, decltype(group)::value>(page.keys, page.count, dim_, q + g * dim_, &scores_[g * stride_], stride_,
                                             g == 0 ? soon(page, next, Codes::row_bytes(dim_)) : Soon{nullptr, 0});
      });
    });
    soften(page, kept, kept_stride);
    with_codes(f.value_bits, f.whole_bytes, [&](auto codes) {
      for_heads([&](auto group, int g) {
        accumulate<decltype(codes), decltype(group)::value>(page.values, page.count, dim_, &scores_[g * stride_],
                                                            stride_, &decay_[g], out_ + g * dim_);
      });
    });
  }

  void finish() {
    for (int g = 0; g < heads_; g++)
      for (int d = 0; d < dim_; d++) out_[g * dim_ + d] += minimum_[g];
  }

 private:
  template <int G>
  struct Heads {
    static constexpr int value = G;
  };

  template <class Use>
  void for_heads(Use use) {
    int g = 0;
    for (; g + MAX_HEADS <= heads_; g += MAX_HEADS) use(Heads<MAX_HEADS>{}, g);
    switch (heads_ - g) {
      case 1: return use(Heads<1>{}, g);
      case 2: return use(Heads<2>{}, g);
      case 3: return use(Heads<3>{}, g);
    }
  }

  // Values of whole pages, which are read across their rows; of packed pages the next, a few lines a token.
  static Soon soon(const Page& page, const Page* next, int row_bytes) {
    const Format& f = *page.format;
    if (f.key_scales < 0) return {page.values, row_bytes};
    if (!next) return {nullptr, 0};
    return {next->keys, (f.value_minima / f.page_tokens + 63) / 64 * 64};
  }

  // Leaves q * scale per channel in scaled_ and q . minima in bias_.
  const float* fold_key_scales(const Page& page) {
    read_halves(page.base + page.format->key_scales, dim_, scales_.data());
    read_halves(page.base + page.format->key_minima, dim_, minima_.data());
    for (int g = 0; g < heads_; g++) {
      f32x8 bias = {};
      for (int d = g * dim_, c = 0; c < dim_; d += 8, c += 8) {
        f32x8 q = load(&query_[d]);
        store(&scaled_[d], q * load(&scales_[c]));
        bias += q * load(&minima_[c]);
      }
      bias_[g] = sum_of(bias);
    }
    return scaled_.data();
  }

  // Turns scores_ into weights for the value codes and moves max, sum and minimum on by one page.
  void soften(const Page& page, float* kept, int64_t kept_stride) {
    const Format& f = *page.format;
    const int padded = round_up(page.count);
    for (int g = 0; g < heads_; g++) {
      float* s = &scores_[g * stride_];
      if (f.key_scales >= 0)
        for (int t = 0; t < padded; t += 8) store(s + t, load(s + t) + bias_[g]);
      if (f.key_factors >= 0) {
        read_halves(page.base + f.key_factors, page.count, scales_.data());
        for (int t = 0; t < padded; t += 8) store(s + t, load(s + t) * load(&scales_[t]));
      }
      std::fill(s + page.count, s + padded, -1e30f);
      if (kept) std::copy(s, s + page.count, kept + g * kept_stride);
      f32x8 best = splat(max_[g]);
      for (int t = 0; t < padded; t += 8) best = larger(best, load(s + t));
      const float max = max_of(best);
      f32x8 sum = {};
      for (int t = 0; t < padded; t += 8) {
        f32x8 p = exp2_of(load(s + t) - max);
        sum += p;
        store(s + t, p);
      }
      decay_[g] = exp2_of(max_[g] - max);
      max_[g] = max;
      sum_[g] = sum_[g] * decay_[g] + sum_of(sum);
      minimum_[g] *= decay_[g];
    }
    if (f.value_scales >= 0) fold_value_scales(page, padded);
  }

  void fold_value_scales(const Page& page, int padded) {
    read_halves(page.base + page.format->value_scales, page.count, scales_.data());
    read_halves(page.base + page.format->value_minima, page.count, minima_.data());
    for (int g = 0; g < heads_; g++) {
      f32x8 minimum = {};
      for (int t = 0; t < padded; t += 8) {
        f32x8 p = load(&scores_[g * stride_ + t]);
        minimum += p * load(&minima_[t]);
        store(&scores_[g * stride_ + t], p * load(&scales_[t]));
      }
      minimum_[g] += sum_of(minimum);
    }
  }

  int heads_, dim_, stride_;
  std::vector<float> query_, scaled_, scores_, scales_, minima_, decay_, bias_, minimum_;
  float *out_ = nullptr, *max_ = nullptr, *sum_ = nullptr;
};
