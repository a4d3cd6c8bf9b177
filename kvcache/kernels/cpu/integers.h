// Products of 16-bit integers in pairs, summed exactly in 32 bits, at up to twice the rate of floats: prefill over pages
// that are rounded more coarsely themselves.
//
// A key, or a query, is rounded such that its norm becomes TOP. By Cauchy and Schwarz no part of a product of two then
// exceeds TOP^2, half of what 32 bits hold, and rounding costs it some 1e-5 of the product of their norms. Packed values
// are multiplied as the codes they are, around the middle one, by weights of 15 bits; whole ones are rounded to 12 bits
// and a sign, their weights to 13. A value's scale goes into its weight. Nothing depends on other slots than a row sees.
#pragma once
#include <algorithm>
#include <cmath>

#include "buffer.h"
#include "products.h"
#include "unpack.h"

// Whether integers are faster on this CPU; the flag, 0 or 1, lets tests compile both ways anywhere.
#if defined(KVBATCH_INTEGERS)
constexpr bool HAS_INTEGERS = KVBATCH_INTEGERS;
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr bool HAS_INTEGERS = true;
#else
constexpr bool HAS_INTEGERS = false;
#endif

constexpr float TOP = 32767, TOP_VALUE = 4095;
// Of weights of whole and of packed values. Scores in the thousands are so coarse that a weight can exceed the largest
// by a thousandth.
constexpr float TOP_WEIGHT = 8180, TOP_PACKED_WEIGHT = 32700;
constexpr int TILE_SLOTS = 64;  // scores of a tile and a panel, 6 KB on AVX2, stay in the first-level cache
static_assert(TILE_SLOTS * 4095LL * 8191 < 1LL << 31, "sums fit 32 bits");

// Lane i of sum grows by both products of a's and b's pairs i.
static inline WideInt add_pairs(WideInt sum, WideInt a, WideInt b) {
#if defined(__AVX512VNNI__)
  return (WideInt)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return sum + (WideInt)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return sum + (WideInt)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

static inline Wide to_floats(WideInt x) { return __builtin_convertvector(x, Wide); }

#if defined(__AVX512F__)
constexpr int INTEGER_ROWS = 8;
#else
constexpr int INTEGER_ROWS = 3;  // 9 sums, 3 pairs of b, 1 of a and a product, of 16 registers
#endif

// c[i] = factors * sum over k < depth of a[i * row_step + k * step] . b[k], of pairs; b, c and factors are rows of PANEL.
// If ADD, c[i] before is added; else c[i] is also multiplied by row_factors[i], and the largest number in each column
// raises `largest` [PANEL].
template <int ROWS, bool ADD>
__attribute__((noinline)) static void integer_tile(const uint32_t* a, int64_t row_step, int64_t step,
                                                   const uint32_t* b, int depth, float* c, const float* factors,
                                                   const float* row_factors, float* largest) {
  if (depth < 1) __builtin_unreachable();
  WideInt sums[ROWS][TILE_VECTORS] = {};
#pragma GCC unroll 2
  for (int k = 0; k < depth; k++, a += step, b += PANEL) {
    WideInt row[TILE_VECTORS];
#pragma GCC unroll 3
    for (int j = 0; j < TILE_VECTORS; j++) row[j] = (WideInt)held(load_wide(b + j * WIDE));
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      const WideInt x = WideInt{} + (int32_t)a[i * row_step];
#pragma GCC unroll 3
      for (int j = 0; j < TILE_VECTORS; j++) sums[i][j] = add_pairs(sums[i][j], x, row[j]);
    }
  }
  Wide best[TILE_VECTORS] = {};
#pragma GCC unroll 3
  for (int j = 0; j < TILE_VECTORS && !ADD; j++) best[j] = load_wide(largest + j * WIDE);
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++) {
    const Wide row_factor = wide(ADD ? 0 : row_factors[i]);
#pragma GCC unroll 3
    for (int j = 0; j < TILE_VECTORS; j++) {
      float* to = c + i * PANEL + j * WIDE;
      Wide x = to_floats(sums[i][j]) * load_wide(factors + j * WIDE);
      if (ADD)
        x += load_wide(to);
      else
        x *= row_factor, best[j] = larger_of(best[j], x);
      store_wide(to, x);
    }
  }
#pragma GCC unroll 3
  for (int j = 0; j < TILE_VECTORS && !ADD; j++) store_wide(largest + j * WIDE, best[j]);
}

// The same for any number of rows.
template <bool ADD, int ROWS = INTEGER_ROWS>
static void integer_product(const uint32_t* a, int64_t row_step, int64_t step, int rows, const uint32_t* b, int depth,
                            float* c, const float* factors, const float* row_factors = nullptr,
                            float* largest = nullptr) {
  for (; rows >= ROWS; rows -= ROWS, a += ROWS * row_step, c += ROWS * PANEL, row_factors += ADD ? 0 : ROWS)
    integer_tile<ROWS, ADD>(a, row_step, step, b, depth, c, factors, row_factors, largest);
  if constexpr (ROWS > 1)
    integer_product<ADD, ROWS / 2>(a, row_step, step, rows, b, depth, c, factors, row_factors, largest);
}

// The factor that makes the largest number, or a norm, equal `top`, and its inverse.
struct Rounding {
  float inverse, factor;
  explicit Rounding(float norm, float top = TOP) : inverse(norm == 0 ? 0 : top / norm), factor(norm / top) {}
};

// Rounds a row so that its norm is TOP, and returns the factor that undoes it.
static inline float round_row(const float* row, int dim, int16_t* words) {
  f32x8 squares = {};
  for (int d = 0; d < dim; d += 8) squares += load(row + d) * load(row + d);
  const Rounding rounding(std::sqrt(sum_of(squares)));
  for (int d = 0; d < dim; d += 16) {
    const f32x8 low = load(row + d) * rounding.inverse, high = load(row + d + 8) * rounding.inverse;
    store_words(words + d, low, high);
  }
  return rounding.factor;
}

// Slots of a page: keys as pairs along the head dim, [slots][dim / 2]; values as pairs of slots, [ceil(slots /
// 2)][dim].
class IntegerSlots {
 public:
  const uint32_t *keys = nullptr, *values = nullptr;
  const float* key_factors = nullptr;  // of each key's integers
  // A value is its integers times its scale, plus its minimum. Weights up to 1 of the slots so far may be multiplied by
  // 2^room, that times their scales they are integers as large as may be.
  const float *scales = nullptr, *minima = nullptr, *room = nullptr;

  void read(const Page& page, int dim, int first, int last) {
    const int count = last - first;
    for (auto* buffer : {&key_factors_, &scales_, &minima_, &room_}) buffer->resize(count);
    numbers_.resize(count * dim), keys_.resize(count * dim / 2), values_.resize((count + 1) / 2 * dim);
    round_keys(page, dim, first, last);
    const bool whole = page.format->value_scales < 0;
    whole ? round_values(page, dim, first, last) : read_values(page, dim, first, last);
    float largest = 1e-12f;  // of values that are all zero: factors of weights stay within floats
    for (int t = 0; t < count; t++) {
      largest = larger(largest, scales_.data()[t]);
      room_.data()[t] = std::log2((whole ? TOP_WEIGHT : TOP_PACKED_WEIGHT) / largest);
    }
    keys = keys_.data(), values = values_.data(), key_factors = key_factors_.data();
    scales = scales_.data(), minima = minima_.data(), room = room_.data();
  }

 private:
  void round_keys(const Page& page, int dim, int first, int last) {
    float* to = numbers_.data();
    unpack_.keys(page, dim, first, last, [&](int t, int d, f32x8 x) { store(to + (t - first) * dim + d, x); });
    for (int t = 0; t < last - first; t++)
      key_factors_.data()[t] = round_row(to + t * dim, dim, (int16_t*)(keys_.data() + t * dim / 2));
  }

  void read_values(const Page& page, int dim, int first, int last) {
    const Format& f = *page.format;
    const int middle = 1 << (f.value_bits - 1);  // codes around it are half as large, and so is what rounding costs
    halves_.resize(2 * round_up(page.count));
    float *scale = halves_.data(), *minimum = scale + round_up(page.count);
    read_halves(page.base + f.value_scales, page.count, scale);
    read_halves(page.base + f.value_minima, page.count, minimum);
    for (int t = first; t < last; t++) {
      scales_.data()[t - first] = scale[t];
      minima_.data()[t - first] = minimum[t] + middle * scale[t];
    }
    with_packed(f.value_bits, [&](auto kind) {
      using Codes = decltype(kind);
      const int64_t row_bytes = Codes::row_bytes(dim);
      uint32_t* to = values_.data();
      for (int t = first; t < last; t += 2, to += dim) {
        const uint8_t* row = page.values + t * row_bytes;
        for (int u = 0; u < dim / 16; u++) {
          u32x8 x[2], y[2] = {};
          Codes::codes(row, dim, u, x[0], x[1]);
          if (t + 1 < last) Codes::codes(row + row_bytes, dim, u, y[0], y[1]);
          for (int half = 0; half < 2; half++)
            store_pairs(to + 16 * u + 8 * half, (i32x8)x[half] - middle, (i32x8)y[half] - middle);
        }
      }
    });
  }

  void round_values(const Page& page, int dim, int first, int last) {
    const int count = last - first;
    float* from = numbers_.data();
    unpack_.values(page, dim, first, last, [&](int t, int d, f32x8 x) { store(from + (t - first) * dim + d, x); });
    for (int t = 0; t < count; t++) {
      f32x8 largest = {}, any = {};
      for (int d = 0; d < dim; d += 8) {
        const f32x8 x = load(from + t * dim + d);
        largest = larger(largest, magnitude(x)), any += x * 0.f;
      }
      const Rounding rounding(max_of(largest) + sum_of(any), TOP_VALUE);  // NaN stays
      scales_.data()[t] = rounding.factor, minima_.data()[t] = 0;
      for (int d = 0; d < dim; d += 8) {
        float* x = from + t * dim + d;
        store(x, load(x) * rounding.inverse + 12582912.f);  // 1.5 * 2^23: the low bits are the nearest integer's
      }
    }
    uint32_t* to = values_.data();
    for (int t = 0; t < count; t += 2, from += 2 * dim)
      for (int d = 0; d < dim; d += 8, to += 8)
        store_pairs(to, (i32x8)load(from + d), t + 1 < count ? (i32x8)load(from + dim + d) : i32x8{});
  }

  static void store_pairs(uint32_t* to, i32x8 first, i32x8 second) {
    const i32x8 pairs = (first & 0xffff) | second << 16;
    memcpy(to, &pairs, sizeof pairs);
  }

  Unpack unpack_;
  Buffer<float> numbers_, halves_, key_factors_, scales_, minima_, room_;
  Buffer<uint32_t> keys_, values_;
};
