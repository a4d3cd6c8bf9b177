// How a row of D numbers lies in a page, one struct per width. `read` gives numbers [16 u, 16 u + 16) as two vectors,
// as codes: scales and minima are the caller's business. D is a multiple of 16. Of whole numbers, `half` gives either
// half of those 16 as is cheapest, in the order of `sort_by_remainder<WIDTH>`.
#pragma once
#include "vectors.h"

static inline uint32_t word(const uint8_t* p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}

struct Float32 {
  static constexpr int BYTES = 4, WIDTH = 1;
  static int row_bytes(int dim) { return 4 * dim; }
  static f32x8 half(const uint8_t* row, int u, int half) { return load((const float*)row + 16 * u + 8 * half); }
  static void read(const uint8_t* row, int, int u, f32x8& low, f32x8& high) {
    low = load((const float*)row + 16 * u);
    high = load((const float*)row + 16 * u + 8);
  }
};

struct Bfloat16 {
  static constexpr int BYTES = 2, WIDTH = 2;
  static int row_bytes(int dim) { return 2 * dim; }
  static f32x8 half(const uint8_t* row, int u, int half) {
    u32x8 x;
    memcpy(&x, row + 32 * u, sizeof x);
    return (f32x8)(half ? x & 0xffff0000u : x << 16);
  }
  static void read(const uint8_t* row, int, int u, f32x8& low, f32x8& high) {
    low = (f32x8)(widen((const uint16_t*)row + 16 * u) << 16);
    high = (f32x8)(widen((const uint16_t*)row + 16 * u + 8) << 16);
  }
};

// Of packed numbers `codes` gives the integers themselves.
template <class Codes>
struct Packed {
  static void read(const uint8_t* row, int dim, int u, f32x8& low, f32x8& high) {
    u32x8 codes[2];
    Codes::codes(row, dim, u, codes[0], codes[1]);
    low = to_float(codes[0]);
    high = to_float(codes[1]);
  }
};

struct Bits8 : Packed<Bits8> {
  static int row_bytes(int dim) { return dim; }
  static void codes(const uint8_t* row, int, int u, u32x8& low, u32x8& high) {
    low = widen(row + 16 * u);
    high = widen(row + 16 * u + 8);
  }
};

// A word holds eight codes: every lane takes the whole word and shifts its own code down.
struct Bits4 : Packed<Bits4> {
  static int row_bytes(int dim) { return dim / 2; }
  static void codes(const uint8_t* row, int, int u, u32x8& low, u32x8& high) {
    const u32x8 shift = {0, 4, 8, 12, 16, 20, 24, 28};
    low = splat(word(row + 8 * u)) >> shift & 15u;
    high = splat(word(row + 8 * u + 4)) >> shift & 15u;
  }
};

struct Bits2 : Packed<Bits2> {
  static int row_bytes(int dim) { return dim / 4; }
  static void codes(const uint8_t* row, int, int u, u32x8& low, u32x8& high) {
    const u32x8 shift = {0, 2, 4, 6, 8, 10, 12, 14};
    u32x8 all = splat(word(row + 4 * u));
    low = all >> shift & 3u;
    high = all >> (shift + 16u) & 3u;
  }
};

// A plane of the codes' low two bits, then a plane of their top bits.
struct Bits3 : Packed<Bits3> {
  static int row_bytes(int dim) { return dim / 4 + dim / 8; }
  static void codes(const uint8_t* row, int dim, int u, u32x8& low, u32x8& high) {
    const u32x8 shift = {0, 2, 4, 6, 8, 10, 12, 14}, one = {0, 1, 2, 3, 4, 5, 6, 7};
    const uint8_t* plane = row + dim / 4 + 2 * u;
    u32x8 all = splat(word(row + 4 * u));
    u32x8 top = splat((uint32_t)(plane[0] | plane[1] << 8) << 2);
    low = (all >> shift & 3u) | (top >> one & 4u);
    high = (all >> (shift + 16u) & 3u) | (top >> (one + 8u) & 4u);
  }
};

// Calls use(Numbers{}) with the struct of whole numbers of so many bytes.
template <class Use>
static inline void with_whole(int bytes, Use use) {
  bytes == 2 ? use(Bfloat16{}) : use(Float32{});
}

// Calls use(Bits{}) with the struct for that width.
template <class Use>
static inline void with_packed(int bits, Use use) {
  switch (bits) {
    case 2: return use(Bits2{});
    case 3: return use(Bits3{});
    case 4: return use(Bits4{});
    default: return use(Bits8{});
  }
}

// The same of any page; `whole_bytes` tells the two whole formats apart.
template <class Use>
static inline void with_codes(int bits, int whole_bytes, Use use) {
  bits == 16 ? with_whole(whole_bytes, use) : with_packed(bits, use);
}
