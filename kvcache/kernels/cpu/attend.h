// Attention of the G query heads of one KV head over a few pages of one lane.
//
// Scales never touch the codes: a key channel's scale goes into the query once per page, its minimum into one number
// per query; a value token's scale goes into its softmax weight. So a page is read as codes, once, in registers.
//
// Codes are multiplied as integers: query and weights, scales in them, are rounded to 16-bit words, per page and head
// such that the largest becomes 32,767. That is exact to 2e-5 of the largest, and takes half as many vectors as floats
// and no conversion of codes.
#pragma once
#include <algorithm>
#include <vector>

#include "buffer.h"
#include "page.h"
#include "page_products.h"

// Query heads that share one reading of a page: the sums of more heads do not fit the 16 registers of AVX2. Three heads
// would fit packed pages better, but sharing the unpacking among four is worth more.
constexpr int WHOLE_HEADS = 3, PACKED_HEADS = 4;

// Numbers of some heads as words: a number is its word times its head's factor.
struct Rounded {
  std::vector<int16_t> words;
  std::vector<float> factors;

  void resize(int heads, int width) {
    words.resize(heads * width);
    factors.resize(heads);
  }

  // Returns what to multiply a head's numbers by before they are rounded, the largest then being `top`.
  float settle(int head, float largest, float top) {
    factors[head] = largest * (1 / top);
    return largest > 0 ? top / largest : 0;
  }
};

// The largest word such that `count` products with codes of `bits` bits can be added up in 32 bits.
static inline float top_word(int bits, int count) {
  return std::min(32767.f, 2147e6f / (((1 << bits) - 1) * (float)count));
}

// Online softmax over the pages of one work unit.
class Attention {
 public:
  Attention(int heads, int dim, int page_tokens)
      : heads_(heads), dim_(dim), stride_(round_up(page_tokens)), width_((dim + 63) / 64 * 64), query_(heads * width_),
        sorted_(heads * width_), scores_(heads * stride_), sums_(heads * width_), scales_(std::max(width_, stride_)),
        minima_(std::max(width_, stride_)), decay_(heads), bias_(heads), minimum_(heads) {
    rounded_.resize(heads, std::max(width_, stride_));
    spread_.resize(heads * stride_);
  }

  // Starts a work unit. The caller's out [G, D], max [G] and sum [G] hold the partial result after `add`s and `finish`:
  // out is not divided by sum; max is in units of log2.
  void start(const float* q, float scale, float* out, float* max, float* sum) {
    for (int g = 0; g < heads_; g++)
      for (int d = 0; d < dim_; d++) query_[g * width_ + d] = q[g * dim_ + d] * (scale * LOG2E);
    out_ = out, max_ = max, sum_ = sum;
    std::fill(max, max + heads_, -1e30f);
    std::fill(sum, sum + heads_, 0.f);
    std::fill(sums_.begin(), sums_.end(), 0.f);
    std::fill(minimum_.begin(), minimum_.end(), 0.f);
    sorted_unit_ = 0;
  }

  // Adds a page. With `kept`, scores in units of log2 are left there, heads `kept_stride` apart. `next` may be null.
  void add(const Page& page, const Page* next, float* kept, int64_t kept_stride) {
    if (page.format->key_scales < 0)
      add_whole(page, next, kept, kept_stride);
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

  template <int MAX, class Use>
  void for_heads(Use use) {
    int g = 0;
    for (; g + MAX <= heads_; g += MAX) use(Heads<MAX>{}, g);
    switch (heads_ - g) {
      case 1: return use(Heads<1>{}, g);
      case 2: return use(Heads<2>{}, g);
      case 3: return use(Heads<3>{}, g);
    }
  }

  void add_whole(const Page& page, const Page* next, float* kept, int64_t kept_stride) {
    transpose(false);
    with_whole(page.format->whole_bytes, [&](auto numbers) {
      using Numbers = decltype(numbers);
      sort_query<Numbers>();
      for_heads<WHOLE_HEADS>([&](auto group, int g) {
        score<Numbers, decltype(group)::value>(page.keys, page.count, dim_, &sorted_[g * dim_], &scores_[g * stride_],
                                               stride_, g == 0 ? page.values : nullptr);
      });
      soften<false>(page, kept, kept_stride);
      constexpr bool ahead = Numbers::BYTES == 2;  // numbers of 4 bytes would evict this page from the CPU's cache
      for_heads<WHOLE_HEADS>([&](auto group, int g) {
        constexpr int G = decltype(group)::value;
        for (int u = 0; u < dim_ / 16; u += 2)
          (u + 1 < dim_ / 16 ? accumulate<Numbers, 2, G> : accumulate<Numbers, 1, G>)(
              page.values, page.count, dim_, u, spread(g), &decay_[g], &sums_[g * width_], width_,
              next && ahead && g == 0 ? next->keys + u * 16 * Numbers::BYTES * page.count : nullptr);
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
      for_heads<PACKED_HEADS>([&](auto group, int g) {
        score_words<Codes, decltype(group)::value>(page.keys, page.count, dim_, &rounded_.words[g * width], width,
                                                   &rounded_.factors[g], &bias_[g], &scores_[g * stride_], stride_,
                                                   g == 0 ? soon : Soon{nullptr, 0});
      });
    });
    soften<true>(page, kept, kept_stride);
    transpose(f.value_bits < 8);
    with_words(f.value_bits, [&](auto codes) {
      for_heads<PACKED_HEADS>([&](auto group, int g) {
        accumulate_words<decltype(codes), decltype(group)::value>(
            page.values, page.count, dim_, (const i16x16*)spread(g), &rounded_.factors[g], &decay_[g],
            &sums_[g * width_], width_);
      });
    });
  }

  // Brings numbers, units of 8 WIDTH of them, into the order in which they are multiplied.
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

  // Leaves the query in sorted_, each head as wide as whole units make it, and returns that width.
  template <class Codes>
  int sort_query() {
    constexpr int UNIT = 8 * Codes::WIDTH;
    const int width = (dim_ + UNIT - 1) / UNIT * UNIT;
    if (sorted_unit_ == UNIT) return width;
    sorted_unit_ = UNIT;
    for (int g = 0; g < heads_; g++) std::copy_n(&query_[g * width_], width, &sorted_[g * width]);
    sort<Codes>(sorted_.data(), heads_ * width);
    return width;
  }

  // Leaves q * scale per channel in rounded_, sorted, and q . minima in bias_; returns the width of a head.
  template <class Codes>
  int fold_key_scales(const Page& page) {
    const Format& f = *page.format;
    const int width = sort_query<Codes>();
    read_halves(page.base + f.key_minima, dim_, minima_.data());
    read_halves(page.base + f.key_scales, dim_, scales_.data());
    for (auto* numbers : {&minima_, &scales_}) std::fill(numbers->begin() + dim_, numbers->begin() + width, 0.f);
    sort<Codes>(scales_.data(), width);
    const float top = top_word(f.key_bits, dim_);
    for_heads<PACKED_HEADS>([&](auto group, int first) {
      constexpr int G = decltype(group)::value;
      const int stride = width_;
      const float *plain = &query_[first * stride], *sorted = &sorted_[first * width];
      const float *minima = minima_.data(), *scales = scales_.data();
      f32x8 bias[G] = {}, largest[G] = {};
      for (int i = 0; i < width; i += 8)
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
          bias[g] += load(plain + g * stride + i) * load(minima + i);
          largest[g] = larger(largest[g], magnitude(load(sorted + g * width + i) * load(scales + i)));
        }
      float inverse[G];
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) {
        bias_[first + g] = sum_of(bias[g]);
        inverse[g] = rounded_.settle(first + g, max_of(largest[g]), top);
      }
      int16_t* words = &rounded_.words[first * width];
      for (int i = 0; i < width; i += 8)
#pragma GCC unroll 4
        for (int g = 0; g < G; g++)
          store_words(words + i * G + g * 8, load(sorted + g * width + i) * load(scales + i) * inverse[g]);
    });
    return width;
  }

  // Turns scores_ into weights, of packed pages with their token's scale and rounded, and moves max, sum and minimum on
  // by one page.
  template <bool PACKED>
  void soften(const Page& page, float* kept, int64_t kept_stride) {
    const Format& f = *page.format;
    const int padded = round_up(page.count);
    for (int g = 0; g < heads_; g++) {
      float* s = &scores_[g * stride_];
      std::fill(s + page.count, s + padded, -1e30f);
      if (kept) std::copy(s, s + page.count, kept + g * kept_stride);
    }
    if (PACKED) {
      read_halves(page.base + f.value_scales, page.count, scales_.data());
      read_halves(page.base + f.value_minima, page.count, minima_.data());
    }
    const float top = PACKED ? top_word(f.value_bits, f.page_tokens) : 0;
    constexpr int MAX = PACKED ? PACKED_HEADS : WHOLE_HEADS;
    for_heads<MAX>([&](auto group, int g) { weigh<PACKED, decltype(group)::value>(g, padded, top); });
  }

  f32x8* spread(int head) { return spread_.data() + head * stride_; }

  template <bool PACKED, int G>
  void weigh(int first, int count, float top) {
    // In locals, since the compiler must assume that a stored number changes a member.
    const int stride = stride_;
    const float *scales = scales_.data(), *minima = minima_.data();
    float *s = &scores_[first * stride], *max = max_ + first;
    f32x8 best[G], sum[G] = {}, minimum[G] = {}, largest[G] = {}, decay = {};
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) best[g] = splat(max[g]);
    for (int t = 0; t < count; t += 8)
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) best[g] = larger(best[g], load(s + g * stride + t));
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) {
      const float now = max_of(best[g]);
      decay[g] = max[g] - now;
      max[g] = now;
      best[g] = splat(now);
    }
    decay = exp2_of(decay);
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)  // head by head, so that the sums stay in registers
      for (int t = 0; t < count; t += 8) {
        f32x8 p = exp2_of(load(s + g * stride + t) - best[g]);
        sum[g] += p;
        if (PACKED) {
          minimum[g] += p * load(minima + t);
          p *= load(scales + t);
          largest[g] = larger(largest[g], p);
        }
        store(s + g * stride + t, p);
      }
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) {
      decay_[first + g] = decay[g];
      sum_[first + g] = sum_[first + g] * decay[g] + sum_of(sum[g]);
      minimum_[first + g] = minimum_[first + g] * decay[g] + sum_of(minimum[g]);
    }
    f32x8* to = spread(first);
    if (!PACKED) {
      for (int t = 0; t < count; t++)
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) *to++ = splat(s[g * stride + t]);
      return;
    }
    float inverse[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) inverse[g] = rounded_.settle(first + g, max_of(largest[g]), top);
    int16_t* words = &rounded_.words[first * stride];
    for (int t = 0; t < count; t += 8)
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) store_words(words + g * stride + t, load(s + g * stride + t) * inverse[g]);
    for (int t = 0; t < count; t += 2)
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) *to++ = (f32x8)splat_pair(words + g * stride + t);
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
  int sorted_unit_ = 0;      // numbers of a unit in which sorted_, the query, is sorted
  bool transposed_ = false;  // sums_ are
  std::vector<float> query_;  // [G, width_], zeros beyond the head dim
  std::vector<float> sorted_, scores_, sums_, scales_, minima_, decay_, bias_, minimum_;
  Rounded rounded_;
  Buffer<f32x8> spread_;
  float *out_ = nullptr, *max_ = nullptr, *sum_ = nullptr;
};
