// Packed codes as 16-bit words, two rows of a page at once: what decode multiplies by integers.
//
// Keys: the codes of a row lie side by side, half a vector a row. Sixteen bytes of a row are a unit: word j of them
// holds the codes of WIDTH channels that follow each other, and each of WIDTH vectors has one of them, in the order of
// `sort_by_remainder`.
//
// Values: the two rows' codes of a channel lie side by side. A slice is four vectors of eight channels; two slices of
// codes below a byte are 64 channels, 8 a lane.
//
// Units and slices may reach beyond a row, never beyond its page: callers multiply what lies there by zero, or ignore it.
#pragma once
#include "vectors.h"

typedef uint16_t u16x16 __attribute__((vector_size(32)));

// Sixteen bytes of each.
static inline u16x16 halves(const uint8_t* a, const uint8_t* b) {
#if defined(__AVX2__)
  return (u16x16)_mm256_loadu2_m128i((const __m128i*)b, (const __m128i*)a);
#else
  u16x16 x;
  memcpy(&x, a, 16);
  memcpy((char*)&x + 16, b, 16);
  return x;
#endif
}

// Eight bytes of each as words.
static inline u16x16 widened_halves(const uint8_t* a, const uint8_t* b) {
#if defined(__AVX2__)
  const __m128i low = _mm_loadl_epi64((const __m128i*)a), high = _mm_loadl_epi64((const __m128i*)b);
  return (u16x16)_mm256_cvtepu8_epi16(_mm_unpacklo_epi64(low, high));
#else
  u16x16 x;
  for (int i = 0; i < 8; i++) x[i] = a[i], x[8 + i] = b[i];
  return x;
#endif
}

// Even words of a, odd words of b.
static inline u16x16 alternate(u16x16 a, u16x16 b) {
  return SHUFFLE(u16x16, a, b, 0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31);
}

// Eight numbers of each in turn, as words.
template <class Number>
static inline u16x16 in_turn(const Number* a, const Number* b) {
  return (u16x16)(widen(a) | widen(b) << 16);
}

// The place of vector v in the order of `sort_by_remainder<N>`.
template <int N>
constexpr int backwards(int v) {
  return N == 2 ? v : N == 4 ? v % 2 * 2 + v / 2 : v % 2 * 4 + v / 2 % 2 * 2 + v / 4;
}

// Bits [shift, shift + BITS) of every word.
template <int BITS>
static inline u16x16 field(u16x16 words, int shift) {
  constexpr uint16_t mask = (1 << BITS) - 1;
  return shift + BITS < 16 ? words >> shift & mask : words >> shift;
}

// Keys whose codes fill words without a rest.
template <int BITS>
struct WordKeys {
  u16x16 words;
  WordKeys(const uint8_t* a, const uint8_t* b, int, int unit) : words(halves(a + 16 * unit, b + 16 * unit)) {}
  u16x16 codes(int v) const { return field<BITS>(words, BITS * backwards<16 / BITS>(v)); }
};

template <int BITS>
struct Words;

template <>
struct Words<8> {
  static constexpr int WIDTH = 2;
  static int row_bytes(int dim) { return dim; }
  static int slices(int dim) { return (dim + 31) / 32; }

  typedef WordKeys<8> Keys;

  template <int HALF>
  struct Values {
    const uint8_t *a, *b;
    Values(const uint8_t* a, const uint8_t* b, int, int slice) : a(a + 32 * slice), b(b + 32 * slice) {}
    u16x16 codes(int v) const { return in_turn(a + 8 * v, b + 8 * v); }
  };
};

template <>
struct Words<4> {
  static constexpr int WIDTH = 4;
  static int row_bytes(int dim) { return dim / 2; }
  static int slices(int dim) { return (dim + 63) / 64 * 2; }

  typedef WordKeys<4> Keys;

  template <int HALF>
  struct Values {
    u16x16 words;
    Values(const uint8_t* a, const uint8_t* b, int, int slice) {
      u32x8 x, y;
      memcpy(&x, a + 32 * (slice / 2), sizeof x);
      memcpy(&y, b + 32 * (slice / 2), sizeof y);
      words = HALF ? alternate((u16x16)(x >> 16), (u16x16)y) : alternate((u16x16)x, (u16x16)(y << 16));
    }
    u16x16 codes(int v) const { return field<4>(words, 4 * v); }
  };
};

template <>
struct Words<2> {
  static constexpr int WIDTH = 8;
  static int row_bytes(int dim) { return dim / 4; }
  static int slices(int dim) { return (dim + 63) / 64 * 2; }

  typedef WordKeys<2> Keys;

  template <int HALF>
  struct Values {
    u16x16 words;
    Values(const uint8_t* a, const uint8_t* b, int, int slice)
        : words(in_turn((const uint16_t*)a + 8 * (slice / 2), (const uint16_t*)b + 8 * (slice / 2))) {}
    u16x16 codes(int v) const { return field<2>(words, 8 * HALF + 2 * v); }
  };
};

template <>
struct Words<3> {
  static constexpr int WIDTH = 8;
  static int row_bytes(int dim) { return dim / 4 + dim / 8; }
  static int slices(int dim) { return (dim + 63) / 64 * 2; }

  // Codes are put together a byte each, which makes two vectors.
  struct Keys {
    u16x16 low, top;
    Keys(const uint8_t* a, const uint8_t* b, int dim, int unit) : low(halves(a + 16 * unit, b + 16 * unit)) {
      top = widened_halves(a + dim / 4 + 8 * unit, b + dim / 4 + 8 * unit);
      top |= top << 4;
    }
    u16x16 codes(int v) const {
      const int c = backwards<8>(v) % 4;
      const u16x16 both = (low >> 2 * c & 0x0303) | ((c < 2 ? top << (2 - c) : top >> (c - 2)) & 0x0404);
      return field<8>(both, 8 * (v % 2));
    }
  };

  template <int HALF>
  struct Values {
    Words<2>::Values<HALF> low;
    u16x16 top;
    Values(const uint8_t* a, const uint8_t* b, int dim, int slice)
        : low(a, b, dim, slice), top(in_turn(a + dim / 4 + 8 * (slice / 2), b + dim / 4 + 8 * (slice / 2))) {}
    u16x16 codes(int v) const {
      const int bit = 4 * HALF + v;
      return low.codes(v) | ((bit < 2 ? top << (2 - bit) : top >> (bit - 2)) & 4);
    }
  };
};

// Calls use(Words<bits>{}).
template <class Use>
static inline void with_words(int bits, Use use) {
  switch (bits) {
    case 2: return use(Words<2>{});
    case 3: return use(Words<3>{});
    case 4: return use(Words<4>{});
    default: return use(Words<8>{});
  }
}
