// Vectors as wide as the machine's registers.
#pragma once
#include <cstdint>
#include <cstring>

#include "vectors.h"

#if defined(__AVX512F__)
constexpr int WIDE = 16;
#else
constexpr int WIDE = 8;
#endif

typedef float Wide __attribute__((vector_size(4 * WIDE)));
typedef int32_t WideInt __attribute__((vector_size(4 * WIDE)));
typedef uint32_t WideBits __attribute__((vector_size(4 * WIDE)));

// x - 0, not x + 0, which would make 0 of -0 and so cost an addition.
static inline Wide wide(float x) { return x - Wide{}; }

static inline Wide load_wide(const void* p) {
  Wide x;
  memcpy(&x, p, sizeof x);
  return x;
}

static inline void store_wide(void* p, Wide x) { memcpy(p, &x, sizeof x); }

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

// Keeps x in a register: the compiler would load it again for each use, and loads are the bottleneck.
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

static inline bool any_larger(Wide a, Wide b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)(a > b));
#else
  const WideInt larger = a > b;
  int32_t joined = 0;
  for (int i = 0; i < WIDE; i++) joined |= larger[i];
  return joined;
#endif
}

// 2^x for x < 128, to 2e-7 relative; below -126 the smallest normal number; NaN stays.
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
