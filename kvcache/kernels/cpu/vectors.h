// Eight floats at a time, or sixteen words. The compiler's vector extensions turn them into AVX2, AVX-512 or NEON; where
// its code is slow, a short x86 version stands beside the plain one.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef int16_t i16x16 __attribute__((vector_size(32), may_alias));  // rooms for floats are used for words too

// Numbers of a, then b, by their index.
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(Mask, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(Mask, a, b, ...) __builtin_shuffle(a, b, Mask{__VA_ARGS__})
#endif

constexpr float LOG2E = 1.44269504088896341f;
constexpr float LN2 = 0.69314718055994531f;

static inline f32x8 load(const float* p) {
  f32x8 x;
  memcpy(&x, p, sizeof x);
  return x;
}

static inline void store(float* p, f32x8 x) { memcpy(p, &x, sizeof x); }

// x - 0, not x + 0, which would make 0 of -0 and so cost an addition.
static inline f32x8 splat(float x) { return x - f32x8{}; }

static inline u32x8 splat(uint32_t x) { return u32x8{} + x; }

static inline f32x8 to_float(u32x8 x) { return __builtin_convertvector((i32x8)x, f32x8); }

static inline u32x8 widen(const uint8_t* p) {
#if defined(__AVX2__)
  return (u32x8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  u32x8 x;
  for (int i = 0; i < 8; i++) x[i] = p[i];
  return x;
#endif
}

static inline u32x8 widen(const uint16_t* p) {
#if defined(__AVX2__)
  return (u32x8)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  u32x8 x;
  for (int i = 0; i < 8; i++) x[i] = p[i];
  return x;
#endif
}

// Sums of neighbours in each half: of a's half, then of b's. Twice that is sums of four.
static inline i32x8 add_neighbours(i32x8 a, i32x8 b) {
#if defined(__AVX2__)
  return (i32x8)_mm256_hadd_epi32((__m256i)a, (__m256i)b);
#else
  return i32x8{a[0], a[2], b[0], b[2], a[4], a[6], b[4], b[6]} + i32x8{a[1], a[3], b[1], b[3], a[5], a[7], b[5], b[7]};
#endif
}

static inline f32x8 add_neighbours(f32x8 a, f32x8 b) {
#if defined(__AVX2__)
  return (f32x8)_mm256_hadd_ps((__m256)a, (__m256)b);
#else
  return f32x8{a[0], a[2], b[0], b[2], a[4], a[6], b[4], b[6]} + f32x8{a[1], a[3], b[1], b[3], a[5], a[7], b[5], b[7]};
#endif
}

// The sum of a's halves, then that of b's.
static inline f32x8 add_halves(f32x8 a, f32x8 b) {
  return SHUFFLE(i32x8, a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
         SHUFFLE(i32x8, a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

// For loops whose sums just fit the registers: the compiler would compute all products first and spill them.
template <class Vector>
static inline void hold(Vector& sum) {
#if defined(__AVX2__)
  asm("" : "+x"(sum));
#endif
}

// Lane i of sum grows by a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1].
static inline void add_products(i32x8& sum, i16x16 a, i16x16 b) {
#if defined(__AVX2__)
  sum += (i32x8)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  const i32x8 x = (i32x8)a, y = (i32x8)b;
  sum += (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
  hold(sum);
}

static inline void add_products(i32x8& sum, i16x16 a, const i16x16* b) {
#if defined(__AVX2__)
  i32x8 products;
  asm("vpmaddwd %2, %1, %0" : "=x"(products) : "x"(a), "m"(*b));
  sum += products;
  hold(sum);
#else
  add_products(sum, a, *b);
#endif
}

static inline void add_product(f32x8& sum, f32x8 a, f32x8 b) {
  sum += a * b;
  hold(sum);
}

// Eight words, twice.
static inline i16x16 load_twice(const int16_t* p) {
#if defined(__AVX2__)
  return (i16x16)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
#else
  i16x16 x;
  memcpy(&x, p, 16);
  memcpy((char*)&x + 16, p, 16);
  return x;
#endif
}

// Two words, eight times.
static inline i16x16 splat_pair(const int16_t* p) {
  uint32_t pair;
  memcpy(&pair, p, 4);
  return (i16x16)splat(pair);
}

static inline f32x8 to_float(i32x8 x) { return __builtin_convertvector(x, f32x8); }

// Rounded to nearest; |x| below 2^15.
static inline void store_words(int16_t* p, f32x8 x) {
  typedef int16_t i16x8 __attribute__((vector_size(16)));
  const i32x8 bits = (i32x8)(x + 12582912.f);  // 1.5 * 2^23: the low bits are the nearest integer's
  const i16x8 words = __builtin_convertvector(bits, i16x8);
  memcpy(p, &words, sizeof words);
}

// Sixteen at once, with the rounding of the instruction.
static inline void store_words(int16_t* p, f32x8 low, f32x8 high) {
#if defined(__AVX2__)
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)low), _mm256_cvtps_epi32((__m256)high));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(words, 0xd8));  // halves were packed apart
#else
  store_words(p, low);
  store_words(p + 8, high);
#endif
}

static inline float larger(float a, float b) { return a > b ? a : b; }

static inline f32x8 larger(f32x8 a, f32x8 b) {
#if defined(__AVX2__)
  return (f32x8)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

static inline f32x8 magnitude(f32x8 x) { return (f32x8)((u32x8)x & 0x7fffffffu); }

static inline f32x8 swap_halves(f32x8 x) { return SHUFFLE(i32x8, x, x, 4, 5, 6, 7, 0, 1, 2, 3); }

static inline float max_of(f32x8 x) {
  x = larger(x, swap_halves(x));
  return larger(larger(x[0], x[1]), larger(x[2], x[3]));
}

static inline float sum_of(f32x8 x) {
  x += swap_halves(x);
  return (x[0] + x[1]) + (x[2] + x[3]);
}

// Numbers at even and at odd places of a, then b.
static inline void unzip(f32x8 a, f32x8 b, f32x8& even, f32x8& odd) {
  const f32x8 x = SHUFFLE(i32x8, a, b, 0, 2, 8, 10, 4, 6, 12, 14), y = SHUFFLE(i32x8, a, b, 1, 3, 9, 11, 5, 7, 13, 15);
  even = SHUFFLE(i32x8, x, x, 0, 1, 4, 5, 2, 3, 6, 7);
  odd = SHUFFLE(i32x8, y, y, 0, 1, 4, 5, 2, 3, 6, 7);
}

// Numbers of a and b in turn: undoes `unzip`.
static inline void zip(f32x8& a, f32x8& b) {
  const f32x8 low = SHUFFLE(i32x8, a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  b = SHUFFLE(i32x8, a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  a = low;
}

// Sorts 8 N numbers by their index modulo N, remainders in the order of their bits read backwards.
template <int N>
static inline void sort_by_remainder(f32x8* x) {
  if constexpr (N > 1) {
    f32x8 sorted[N];
#pragma GCC unroll 4
    for (int i = 0; i < N / 2; i++) unzip(x[2 * i], x[2 * i + 1], sorted[i], sorted[N / 2 + i]);
    sort_by_remainder<N / 2>(sorted);
    sort_by_remainder<N / 2>(sorted + N / 2);
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) x[i] = sorted[i];
  }
}

// 2^x for x <= 0, to about 2e-7 relative; below -126 the smallest normal number.
static inline f32x8 exp2_of(f32x8 x) {
  x = larger(x, splat(-126.f));
  const f32x8 round = splat(12582912.f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  f32x8 shifted = x + round;
  f32x8 f = x - (shifted - round);  // [-0.5, 0.5]
  f32x8 p = splat(1.32647271e-3f);
  p = p * f + 9.67151264e-3f;
  p = p * f + 5.55073374e-2f;
  p = p * f + 2.40222421e-1f;
  p = p * f + 6.93146978e-1f;
  p = p * f + 1.f;
  return (f32x8)((i32x8)p + ((i32x8)shifted << 23));
}

static inline float exp2_of(float x) { return exp2_of(splat(x))[0]; }

static inline f32x8 from_half(const uint16_t* p) {
#if defined(__F16C__) && defined(__AVX2__)
  return (f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  // A product corrects the exponent's bias, and gets subnormals right too.
  u32x8 h = widen(p);
  f32x8 magnitude = (f32x8)((h & 0x7fffu) << 13) * 0x1p112f;
  return (f32x8)((u32x8)magnitude | (h & 0x8000u) << 16);
#endif
}

// Round to nearest even; |x| up to the largest float16.
static inline void to_half(f32x8 x, uint16_t* p) {
#if defined(__F16C__) && defined(__AVX2__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  const u32x8 bits = (u32x8)x, magnitude = bits & 0x7fffffffu;
  const u32x8 normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  // One half's last place is that of a subnormal float16, so adding it rounds there.
  const u32x8 subnormal = (u32x8)((f32x8)magnitude + 0.5f) - (126u << 23);
  const u32x8 half = (magnitude < (113u << 23) ? subnormal : normal) | (bits >> 16 & 0x8000u);
  for (int i = 0; i < 8; i++) p[i] = (uint16_t)half[i];
#endif
}

static inline f32x8 through_half(f32x8 x) {
  uint16_t halves[8];
  to_half(x, halves);
  return from_half(halves);
}

// Reads exactly `count` float16 numbers; the rest of the last eight floats of `out` becomes zero.
static inline void read_halves(const uint8_t* p, int count, float* out) {
  int i = 0;
  for (; i + 8 <= count; i += 8) store(out + i, from_half((const uint16_t*)p + i));
  if (i < count) {
    uint16_t rest[8] = {};
    memcpy(rest, p + 2 * i, 2 * (count - i));
    store(out + i, from_half(rest));
  }
}

// Round to nearest even.
static inline void store_bf16(uint16_t* p, f32x8 x) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
  const __m128bh rounded = _mm256_cvtneps_pbh((__m256)x);
#else
  typedef uint16_t u16x8 __attribute__((vector_size(16)));
  const u32x8 bits = (u32x8)x;
  const u16x8 rounded = __builtin_convertvector((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, u16x8);
#endif
  memcpy(p, &rounded, sizeof rounded);
}
