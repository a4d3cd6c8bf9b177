// Vectors as wide as the machine's registers, and the tile of a matrix product that fills them all.
#pragma once
#include <cstdint>
#include <cstring>

#include "vectors.h"

#if defined(__AVX512F__)
constexpr int WIDE = 16;
#else
constexpr int WIDE = 8;
#endif
// 4 × 3 sums, 3 numbers of b and 1 of a: all 16 registers of AVX2, and enough sums to hide an addition's latency.
constexpr int TILE_ROWS = 4;
constexpr int TILE_VECTORS = 3;
constexpr int PANEL = TILE_VECTORS * WIDE;  // query rows that are computed side by side

typedef float Wide __attribute__((vector_size(4 * WIDE)));
typedef int32_t WideInt __attribute__((vector_size(4 * WIDE)));

// x - 0, not x + 0, which would make 0 of -0 and so cost an addition.
static inline Wide wide(float x) { return x - Wide{}; }

static inline Wide load_wide(const float* p) {
  Wide x;
  memcpy(&x, p, sizeof x);
  return x;
}

static inline void store_wide(float* p, Wide x) { memcpy(p, &x, sizeof x); }

// NaN in b stays.
static inline Wide larger_of(Wide a, Wide b) {
#if defined(__AVX512F__)
  return (Wide)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Wide)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// Keeps x in a register: the compiler would rather load it again for each of its uses, and loads are what is scarce.
static inline Wide held(Wide x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__AVX2__)
  asm("" : "+x"(x));
#endif
  return x;
}

static inline float largest_of(Wide x) {
  float best = x[0];
  for (int i = 1; i < WIDE; i++) best = x[i] > best ? x[i] : best;
  return best;
}

static inline bool any(WideInt x) {
  int32_t joined = 0;
  for (int i = 0; i < WIDE; i++) joined |= x[i];
  return joined;
}

// 2^x for x <= 0, to 2e-7 relative; below -126 the smallest normal number; NaN stays.
static inline Wide fast_exp2(Wide x) {
  x = larger_of(wide(-126.f), x);
  const Wide round = wide(12582912.f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  Wide shifted = x + round;
  Wide f = x - (shifted - round);  // [-0.5, 0.5]
  Wide p = wide(1.3264727e-3f);
  p = p * f + 9.6715126e-3f;
  p = p * f + 5.5507337e-2f;
  p = p * f + 2.4022242e-1f;
  p = p * f + 6.9314698e-1f;
  p = p * f + 1.f;
  return (Wide)((WideInt)p + ((WideInt)shifted << 23));
}

// c[i] = sum over k < depth of a[i * row_step + k * step] * b[k]; b and c are rows of PANEL. If ADD, c[i] before is
// added, else the product's largest number in each column raises `largest` [PANEL], while it is still in registers.
//
// Not inlined: the loop needs all registers, and its caller's numbers would push some of them out.
template <int ROWS, bool ADD>
__attribute__((noinline)) static void product_tile(const float* a, int64_t row_step, int64_t step, const float* b,
                                                   int depth, float* c, float* largest) {
  Wide sums[ROWS][TILE_VECTORS];
#pragma GCC unroll 4
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 3
    for (int j = 0; j < TILE_VECTORS; j++) sums[i][j] = ADD ? load_wide(c + i * PANEL + j * WIDE) : wide(0);
  for (int k = 0; k < depth; k++, a += step, b += PANEL) {
    Wide row[TILE_VECTORS];
#pragma GCC unroll 3
    for (int j = 0; j < TILE_VECTORS; j++) row[j] = held(load_wide(b + j * WIDE));
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++) {
      const Wide x = wide(a[i * row_step]);
#pragma GCC unroll 3
      for (int j = 0; j < TILE_VECTORS; j++) sums[i][j] += x * row[j];
    }
  }
#pragma GCC unroll 3
  for (int j = 0; j < TILE_VECTORS; j++) {
    Wide best = ADD ? wide(0) : load_wide(largest + j * WIDE);
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++) {
      if (!ADD) best = larger_of(best, sums[i][j]);
      store_wide(c + i * PANEL + j * WIDE, sums[i][j]);
    }
    if (!ADD) store_wide(largest + j * WIDE, best);
  }
}

// The same for any number of rows.
template <bool ADD>
static void product(const float* a, int64_t row_step, int64_t step, int rows, const float* b, int depth, float* c,
                    float* largest) {
  const auto tile = [&](auto use, int i) { use(a + i * row_step, row_step, step, b, depth, c + i * PANEL, largest); };
  int i = 0;
  for (; i + TILE_ROWS <= rows; i += TILE_ROWS) tile(product_tile<TILE_ROWS, ADD>, i);
  if (rows - i >= 2) tile(product_tile<2, ADD>, i), i += 2;
  if (rows - i) tile(product_tile<1, ADD>, i);
}
