// Float32 and bfloat16 numbers, eight at a time, as float32 in registers; and rows of int8 with one scale.
#pragma once
#include "vectors.h"

typedef uint16_t bf16;
typedef uint8_t u8x8 __attribute__((vector_size(8)));

static inline f32x8 read(const float* p) { return load(p); }

static inline f32x8 read(const bf16* p) { return (f32x8)(widen(p) << 16); }

static inline void write(float* p, f32x8 x) { store(p, x); }

static inline void write(bf16* p, f32x8 x) { store_bf16(p, x); }

// Keeps a product from being contracted with the addition that follows: two roundings, as in the torch reference.
static inline f32x8 rounded(f32x8 x) {
#if defined(__AVX2__)
  asm("" : "+x"(x));
#endif
  return x;
}

// |x| to the largest is 127; a row that is not finite gets a scale that is not.
static inline void quantize_row(const float* x, int count, int8_t* codes, float* scale) {
  f32x8 best = splat(0.f), poison = splat(0.f);
  for (int i = 0; i < count; i += 8) {
    const f32x8 magnitude = (f32x8)((u32x8)load(x + i) & 0x7fffffffu);
    best = larger(magnitude, best);
    poison += magnitude * 0.f;
  }
  const float largest = max_of(best);
  const f32x8 inverse = splat(largest > 1e-30f ? 127.f / largest : 0.f);
  const f32x8 round = splat(12582912.f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  *scale = largest / 127.f + sum_of(poison);
  for (int i = 0; i < count; i += 8) {
    const u32x8 integers = (u32x8)(rounded(load(x + i) * inverse) + round);
    const u8x8 low = __builtin_convertvector(integers, u8x8);
    memcpy(codes + i, &low, sizeof low);
  }
}
