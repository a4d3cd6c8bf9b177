// Attention of the G query heads of one KV head over a few pages of one lane.
//
// Scales never touch the codes: a key channel's scale goes into the query once per page, its minimum into one number
// per query; a value token's scale goes into its softmax weight. So a page is read as codes, once, in registers.
//
// Codes are multiplied as integers: query and weights, scales in them, are rounded to words whose largest is TOP, per
// page and head. That is exact to 2e-5 of the largest, takes half the vectors of floats, and no conversion of codes.
#pragma once
#include <algorithm>
#include <vector>

#include "codes.h"
#include "page.h"
#include "words.h"

// Up to four query heads share one unpacking of the codes: more do not fit the 16 registers of AVX2.
constexpr int MAX_HEADS = 4;

// What will be read next: memory is asked for it, some bytes per token, while the arithmetic is busy.
struct Soon {
  const uint8_t* start;
  int token_bytes;
};

// Whole pages: scores[g * stride + t] = q[g] . codes[t], for t < count; up to the next multiple of 8 whatever.
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

// Whole pages: out[g] = out[g] * decay[g] + sum over t of weights[g * stride + t] * codes[t]; heads `width` apart.
template <class Codes, int G>
static void accumulate(const uint8_t* codes, int count, int dim, const float* weights, int stride, const float* decay,
                       float* out, int width) {
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
      float* o = out + g * width + 16 * u;
      store(o, load(o) * decay[g] + low[g]);
      store(o + 8, load(o + 8) * decay[g] + high[g]);
    }
  }
}

// A number of heads in words: number i is words[i] * factor of its head.
struct Rounded {
  std::vector<int16_t> words;
  std::vector<float> factors;

  void resize(int heads, int width) {
    words.resize(heads * width);
    factors.resize(heads);
  }

  // Rounds x * scale of G heads, the largest of a head to `top`.
  template <int G>
  void round(int first, const float* x, int x_stride, const float* scale, int stride, int count, float top) {
    f32x8 largest[G] = {};
    for (int i = 0; i < count; i += 8)
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) largest[g] = larger(largest[g], magnitude(load(x + g * x_stride + i) * load(scale + i)));
    float inverse[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) {
      const float most = max_of(largest[g]);
      inverse[g] = most > 0 ? top / most : 0;
      factors[first + g] = most * (1 / top);
    }
    int16_t* to = &words[first * stride];
    for (int i = 0; i < count; i += 8)
#pragma GCC unroll 4
      for (int g = 0; g < G; g++)
        store_words(to + g * stride + i, load(x + g * x_stride + i) * load(scale + i) * inverse[g]);
  }
};

// The largest word such that so many products with codes can be added up in 32 bits.
static inline float top_word(int bits, int count) {
  return std::min(32767.f, 2147e6f / (((1 << bits) - 1) * (float)count));
}

// Packed pages: scores[g * stride + t] = q[g] . codes[t] * factors[g] + bias[g], for t < count rounded up to eights; q
// in the order of the codes' vectors.
template <class Codes, int G>
__attribute__((noinline)) static void score_words(const uint8_t* codes, int count, int dim, const int16_t* q, int width, const float* factors,
                        const float* bias, float* scores, int stride, Soon soon) {
  const int row_bytes = Codes::row_bytes(dim);
  for (int t0 = 0; t0 < count; t0 += 8) {
    i32x8 sums[G][2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      // A vector has token t in its lower half and token t + 4 in its upper one.
      const uint8_t* row = codes + (int64_t)(t0 + 2 * i) * row_bytes;
      i32x8 a[G] = {}, b[G] = {};
      for (int u = 0; u < width / (8 * Codes::WIDTH); u++) {
        const typename Codes::Keys x(row, row + 4 * row_bytes, dim, u);
        const typename Codes::Keys y(row + row_bytes, row + 5 * row_bytes, dim, u);
#pragma GCC unroll 8
        for (int v = 0; v < Codes::WIDTH; v++) {
          const i16x16 x_codes = (i16x16)x.codes(v), y_codes = (i16x16)y.codes(v);
#pragma GCC unroll 4
          for (int g = 0; g < G; g++) {
            const i16x16 query = load_twice(q + g * width + (u * Codes::WIDTH + v) * 8);
            add_products(a[g], x_codes, query);
            add_products(b[g], y_codes, query);
          }
        }
      }
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) sums[g][i] = add_neighbours(a[g], b[g]);
    }
    for (int at = t0 * soon.token_bytes; at < (t0 + 8) * soon.token_bytes; at += 64)
      __builtin_prefetch(soon.start + at);
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
      store(scores + g * stride + t0, to_float(add_neighbours(sums[g][0], sums[g][1])) * factors[g] + bias[g]);
  }
}

// Packed pages: out[g] = out[g] * decay[g] + sum over t of weights[g * stride + t] * codes[t] * factors[g], in the
// order of the codes' vectors.
template <class Codes, int HALF, int G>
__attribute__((noinline)) static void accumulate_slice(const uint8_t* codes, int count, int dim, int slice, const int16_t* weights, int stride,
                             const float* factors, const float* decay, float* out, int width) {
  const int row_bytes = Codes::row_bytes(dim);
  i32x8 sums[G][4] = {};
  for (int t = 0; t < count; t += 2) {
    const uint8_t* row = codes + (int64_t)t * row_bytes;
    const typename Codes::template Values<HALF> x(row, row + row_bytes, dim, slice);
    i16x16 pair[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) pair[g] = splat_pair(weights + g * stride + t);
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      const i16x16 x_codes = (i16x16)x.codes(v);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) add_products(sums[g][v], x_codes, pair[g]);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; g++)
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      float* o = out + g * width + 32 * slice + 8 * v;
      store(o, load(o) * decay[g] + to_float(sums[g][v]) * factors[g]);
    }
}

template <class Codes, int G>
static void accumulate_words(const uint8_t* codes, int count, int dim, const int16_t* weights, int stride,
                             const float* factors, const float* decay, float* out, int width) {
  for (int slice = 0; slice < Codes::slices(dim); slice++)
    (slice % 2 ? accumulate_slice<Codes, 1, G> : accumulate_slice<Codes, 0, G>)(
        codes, count, dim, slice, weights, stride, factors, decay, out, width);
}

// Online softmax over the pages of one work unit.
class Attention {
 public:
  Attention(int heads, int dim, int page_tokens)
      : heads_(heads), dim_(dim), stride_(round_up(page_tokens)), width_((dim + 63) / 64 * 64), query_(heads * dim),
        sorted_(heads * width_), scores_(heads * stride_), sums_(heads * width_), channels_(width_), scales_(stride_),
        minima_(stride_), decay_(round_up(heads)), page_sum_(heads), bias_(heads), minimum_(heads) {
    rounded_.resize(heads, std::max(width_, stride_));
  }

  // Starts anew. out [G, D], max [G], sum [G] are the caller's and hold the partial result after `add`s and `finish`:
  // out is not divided by sum; max is in units of log2.
  void start(const float* q, float scale, float* out, float* max, float* sum) {
    for (int i = 0; i < heads_ * dim_; i++) query_[i] = q[i] * (scale * LOG2E);
    out_ = out, max_ = max, sum_ = sum;
    std::fill(max, max + heads_, -1e30f);
    std::fill(sum, sum + heads_, 0.f);
    std::fill(sums_.begin(), sums_.end(), 0.f);
    std::fill(minimum_.begin(), minimum_.end(), 0.f);
    sorted_bits_ = 0;
  }

  // Adds a page. With `kept`, scores in units of log2 are left there, heads `kept_stride` apart. `next` may be null.
  void add(const Page& page, const Page* next, float* kept, int64_t kept_stride) {
    if (page.format->key_scales < 0)
      add_whole(page, kept, kept_stride);
    else
      add_packed(page, next, kept, kept_stride);
  }

  void finish() {
    transpose(false);
    for (int g = 0; g < heads_; g++)
      for (int d = 0; d < dim_; d++) out_[g * dim_ + d] = sums_[g * width_ + d] + minimum_[g];
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

  void add_whole(const Page& page, float* kept, int64_t kept_stride) {
    transpose(false);
    with_codes(16, page.format->whole_bytes, [&](auto codes) {
      using Codes = decltype(codes);
      for_heads([&](auto group, int g) {
        // Values are read across their rows.
        const Soon soon = {page.values, g == 0 ? Codes::row_bytes(dim_) : 0};
        score<Codes, decltype(group)::value>(page.keys, page.count, dim_, &query_[g * dim_], &scores_[g * stride_],
                                             stride_, soon);
      });
      soften(page, kept, kept_stride);
      for_heads([&](auto group, int g) {
        accumulate<Codes, decltype(group)::value>(page.values, page.count, dim_, &scores_[g * stride_], stride_,
                                                  &decay_[g], &sums_[g * width_], width_);
      });
    });
  }

  void add_packed(const Page& page, const Page* next, float* kept, int64_t kept_stride) {
    const Format& f = *page.format;
    // Of the next page, a few bytes a token.
    const Soon soon = {next ? next->keys : nullptr, next ? (f.value_minima + f.page_tokens - 1) / f.page_tokens : 0};
    with_words(f.key_bits, [&](auto codes) {
      using Codes = decltype(codes);
      const int width = fold_key_scales<Codes>(page);
      for_heads([&](auto group, int g) {
        score_words<Codes, decltype(group)::value>(page.keys, page.count, dim_, &rounded_.words[g * width], width,
                                                   &rounded_.factors[g], &bias_[g], &scores_[g * stride_], stride_,
                                                   g == 0 ? soon : Soon{nullptr, 0});
      });
    });
    soften(page, kept, kept_stride);
    fold_value_scales(page);
    transpose(f.value_bits < 8);
    with_words(f.value_bits, [&](auto codes) {
      for_heads([&](auto group, int g) {
        accumulate_words<decltype(codes), decltype(group)::value>(
            page.values, page.count, dim_, &rounded_.words[g * stride_], stride_, &rounded_.factors[g], &decay_[g],
            &sums_[g * width_], width_);
      });
    });
  }

  // Brings numbers [units of 8 WIDTH] into the order of the vectors of codes.
  template <class Codes>
  static void sort(float* x, int count) {
    for (int i = 0; i < count; i += 8 * Codes::WIDTH) {
      f32x8 unit[Codes::WIDTH];
#pragma GCC unroll 8
      for (int v = 0; v < Codes::WIDTH; v++) unit[v] = load(x + i + 8 * v);
      sort_by_remainder<Codes::WIDTH>(unit);
#pragma GCC unroll 8
      for (int v = 0; v < Codes::WIDTH; v++) store(x + i + 8 * v, unit[v]);
    }
  }

  // Leaves q * scale per channel in rounded_, in the order of the vectors of codes, and q . minima in bias_. Returns how
  // many numbers a head has: what is beyond the channels is zero.
  template <class Codes>
  int fold_key_scales(const Page& page) {
    const Format& f = *page.format;
    const int width = (dim_ + 8 * Codes::WIDTH - 1) / (8 * Codes::WIDTH) * (8 * Codes::WIDTH);
    if (sorted_bits_ != f.key_bits) {
      sorted_bits_ = f.key_bits;
      for (int g = 0; g < heads_; g++) {
        std::copy(&query_[g * dim_], &query_[g * dim_] + dim_, &sorted_[g * width]);
        std::fill(&sorted_[g * width] + dim_, &sorted_[g * width] + width, 0.f);
      }
      sort<Codes>(sorted_.data(), heads_ * width);
    }
    read_halves(page.base + f.key_minima, dim_, channels_.data());
    for (int g = 0; g < heads_; g++) {
      f32x8 bias = {};
      for (int d = 0; d < dim_; d += 8) bias += load(&query_[g * dim_ + d]) * load(&channels_[d]);
      bias_[g] = sum_of(bias);
    }
    read_halves(page.base + f.key_scales, dim_, channels_.data());
    std::fill(&channels_[0] + dim_, &channels_[0] + width, 0.f);
    sort<Codes>(channels_.data(), width);
    const float top = top_word(f.key_bits, dim_);
    for_heads([&](auto group, int g) {
      rounded_.round<decltype(group)::value>(g, &sorted_[g * width], width, channels_.data(), width, width, top);
    });
    return width;
  }

  // Turns scores_ into weights and moves max, sum and minimum on by one page.
  void soften(const Page& page, float* kept, int64_t kept_stride) {
    const Format& f = *page.format;
    const int padded = round_up(page.count);
    if (f.key_factors >= 0) read_halves(page.base + f.key_factors, page.count, scales_.data());
    for (int g = 0; g < heads_; g++) {
      float* s = &scores_[g * stride_];
      if (f.key_factors >= 0)
        for (int t = 0; t < padded; t += 8) store(s + t, load(s + t) * load(&scales_[t]));
      std::fill(s + page.count, s + padded, -1e30f);
      if (kept) std::copy(s, s + page.count, kept + g * kept_stride);
    }
    for_heads([&](auto group, int g) { exponentiate<decltype(group)::value>(g, padded); });
    for (int g = 0; g < heads_; g += 8) store(&decay_[g], exp2_of(load(&decay_[g])));
    for (int g = 0; g < heads_; g++) {
      sum_[g] = sum_[g] * decay_[g] + page_sum_[g];
      minimum_[g] *= decay_[g];
    }
  }

  // Scores of heads [first, first + G) to weights; the logarithm of what older weights decay by goes to decay_.
  template <int G>
  void exponentiate(int first, int count) {
    float* s = &scores_[first * stride_];
    f32x8 best[G], sum[G] = {};
    float max[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) best[g] = splat(max_[first + g]);
    for (int t = 0; t < count; t += 8)
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) best[g] = larger(best[g], load(s + g * stride_ + t));
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) max[g] = max_of(best[g]);
    for (int t = 0; t < count; t += 8)
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) {
        const f32x8 p = exp2_of(load(s + g * stride_ + t) - max[g]);
        sum[g] += p;
        store(s + g * stride_ + t, p);
      }
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) {
      decay_[first + g] = max_[first + g] - max[g];
      max_[first + g] = max[g];
      page_sum_[first + g] = sum_of(sum[g]);
    }
  }

  // Leaves weight * scale per token in rounded_ and adds weights . minima to minimum_.
  void fold_value_scales(const Page& page) {
    const int padded = round_up(page.count);
    read_halves(page.base + page.format->value_scales, page.count, scales_.data());
    read_halves(page.base + page.format->value_minima, page.count, minima_.data());
    const float top = top_word(page.format->value_bits, page.format->page_tokens);
    for_heads([&](auto group, int first) {
      constexpr int G = decltype(group)::value;
      const float* s = &scores_[first * stride_];
      f32x8 minimum[G] = {};
      for (int t = 0; t < padded; t += 8)
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) minimum[g] += load(s + g * stride_ + t) * load(&minima_[t]);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) minimum_[first + g] += sum_of(minimum[g]);
      rounded_.round<G>(first, s, stride_, scales_.data(), stride_, padded, top);
    });
  }

  // Values of less than a byte come eight channels a lane; others in order. Each is the other's transpose.
  void transpose(bool wanted) {
    if (transposed_ == wanted) return;
    transposed_ = wanted;
    for (float* block = sums_.data(); block < sums_.data() + sums_.size(); block += 64)
      for (int i = 0; i < 8; i++)
        for (int j = 0; j < i; j++) std::swap(block[8 * i + j], block[8 * j + i]);
  }

  const int heads_, dim_, stride_, width_;
  int sorted_bits_ = 0;      // key bits that sorted_, the query, is sorted for
  bool transposed_ = false;  // sums_ are
  std::vector<float> query_, sorted_, scores_, sums_, channels_, scales_, minima_, decay_, page_sum_, bias_,
      minimum_;
  Rounded rounded_;
  float *out_ = nullptr, *max_ = nullptr, *sum_ = nullptr;
};
