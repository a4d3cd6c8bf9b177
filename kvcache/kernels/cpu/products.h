// Tiles of matrix products that fill all registers: of floats, and of bfloat16 numbers in pairs, which CPUs with the
// instruction for it multiply at two to four times the rate of floats. Sums are floats in both.
#pragma once
#include "wide.h"

#if defined(__AVX512F__)
// 8 × 3 sums, 3 numbers of b and 1 of a, of 32 registers.
constexpr int TILE_ROWS = 8;
#else
// 4 × 3 sums, 3 numbers of b and 1 of a: all 16 registers of AVX2, and enough sums to hide an addition's latency.
constexpr int TILE_ROWS = 4;
#endif
constexpr int TILE_VECTORS = 3;
constexpr int PANEL = TILE_VECTORS * WIDE;  // query rows that are computed side by side

// What products are made of. STEP numbers that follow each other along the sum make one element of a product.
struct Floats {
  typedef float Element;
  static constexpr int STEP = 1;

  // Element k of a row of floats or bfloat16.
  static float read(const void* row, bool bf16, int k) {
    if (!bf16) return ((const float*)row)[k];
    const uint32_t bits = (uint32_t)((const uint16_t*)row)[k] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
  }

  static Wide splat(float x) { return wide(x); }
  static Wide add(Wide sum, Wide a, Wide b) { return sum + a * b; }
  static Wide join(const Wide* x) { return x[0]; }
  static Wide exp2(Wide x) { return fast_exp2(x); }
};

#if defined(__AVX512BF16__) || defined(KVBATCH_BF16)
#define KVBATCH_HAS_PAIRS 1

// Two bfloat16 numbers, the first in the low half. Without the instructions their arithmetic is done in floats, number
// by number: slow, but so the path can be tested anywhere (-DKVBATCH_BF16).
struct Pairs {
  typedef uint32_t Element;
  static constexpr int STEP = 2;

  static uint32_t read(const void* row, bool, int k) {
    uint32_t x;
    memcpy(&x, (const char*)row + 4 * k, sizeof x);
    return x;
  }

  static Wide splat(uint32_t x) { return (Wide)(WideBits{} + x); }

  // The second numbers first, as the instruction is specified; it also takes subnormal numbers for zero.
  static Wide add(Wide sum, Wide a, Wide b) {
#if defined(__AVX512BF16__)
    return (Wide)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    const WideBits x = (WideBits)a, y = (WideBits)b;
    sum += (Wide)(x & 0xffff0000u) * (Wide)(y & 0xffff0000u);
    return sum + (Wide)(x << 16) * (Wide)(y << 16);
#endif
  }

  // Rounds to nearest even; NaN stays.
  static Wide join(const Wide* x) {
#if defined(__AVX512BF16__)
    alignas(64) static constexpr uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]);
    return (Wide)_mm512_permutexvar_epi16(_mm512_load_si512(order), both);
#else
    return (Wide)(rounded(x[0]) >> 16 | (rounded(x[1]) & 0xffff0000u));
#endif
  }

  // 2^x for x < 128, to 1e-4, a twentieth of what rounding to bfloat16 costs; next to nothing below -126; NaN stays.
  static Wide exp2(Wide x) {
#if defined(__AVX512BF16__)
    const Wide f = (Wide)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    return (Wide)_mm512_scalef_ps((__m512)power(f), (__m512)x);
#else
    x = larger_of(wide(-126.f), x);
    const Wide round = wide(12582912.f);  // as in fast_exp2
    const Wide shifted = x - 0.5f + round, f = x - (shifted - round);
    return (Wide)((WideInt)power(f) + ((WideInt)shifted << 23));
#endif
  }

 private:
  // 2^f for f in [0, 1]
  static Wide power(Wide f) { return ((7.802452e-2f * f + 2.2606716e-1f) * f + 6.9583353e-1f) * f + 9.9992522e-1f; }

  static WideBits rounded(Wide x) {
    const WideBits bits = (WideBits)x;
    return x == x ? bits + 0x7fffu + (bits >> 16 & 1u) : bits | 0x400000u;
  }
};
#endif

// c[i] = sum over k < depth of a[i * row_step + k * step] * b[k]; b and c are rows of PANEL, k counts elements. If ADD,
// c[i] before is added, else the product's largest number in each column raises `largest` [PANEL], while it is still in
// registers.
//
// Not inlined: the loop needs all registers, and its caller's numbers would occupy some.
template <class Kind, int ROWS, bool ADD>
__attribute__((noinline)) static void product_tile(const typename Kind::Element* a, int64_t row_step, int64_t step,
                                                   const typename Kind::Element* b, int depth, float* c,
                                                   float* largest) {
  if (depth < 1) __builtin_unreachable();  // else the compiler spills the sums to join them with those of no step
  Wide sums[ROWS][TILE_VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 3
    for (int j = 0; j < TILE_VECTORS; j++) sums[i][j] = ADD ? load_wide(c + i * PANEL + j * WIDE) : wide(0);
  for (int k = 0; k < depth; k++, a += step, b += PANEL) {
    Wide row[TILE_VECTORS];
#pragma GCC unroll 3
    for (int j = 0; j < TILE_VECTORS; j++) row[j] = held(load_wide(b + j * WIDE));
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      const Wide x = Kind::splat(a[i * row_step]);
#pragma GCC unroll 3
      for (int j = 0; j < TILE_VECTORS; j++) sums[i][j] = Kind::add(sums[i][j], x, row[j]);
    }
  }
#pragma GCC unroll 3
  for (int j = 0; j < TILE_VECTORS; j++) {
    Wide best = ADD ? wide(0) : load_wide(largest + j * WIDE);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      if (!ADD) best = larger_of(best, sums[i][j]);
      store_wide(c + i * PANEL + j * WIDE, sums[i][j]);
    }
    if (!ADD) store_wide(largest + j * WIDE, best);
  }
}

// The same for any number of rows.
template <class Kind, bool ADD, int ROWS = TILE_ROWS>
static void product(const typename Kind::Element* a, int64_t row_step, int64_t step, int rows,
                    const typename Kind::Element* b, int depth, float* c, float* largest) {
  for (; rows >= ROWS; rows -= ROWS, a += ROWS * row_step, c += ROWS * PANEL)
    product_tile<Kind, ROWS, ADD>(a, row_step, step, b, depth, c, largest);
  if constexpr (ROWS > 1) product<Kind, ADD, ROWS / 2>(a, row_step, step, rows, b, depth, c, largest);
}
