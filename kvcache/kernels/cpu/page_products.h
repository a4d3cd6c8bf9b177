// Products of some query heads with the rows of a page: scores with keys, weights with values, in registers.
#pragma once
#include <algorithm>

#include "codes.h"
#include "words.h"

// Bytes that will be read next: they are prefetched, a few per token, during the arithmetic.
struct Soon {
  const uint8_t* start;
  int token_bytes;
};

// Prefetches bytes that will be read soon; returns the address behind them.
template <int BYTES>
static inline const uint8_t* fetch(const uint8_t* soon) {
#pragma GCC unroll 4
  for (int b = 0; b < BYTES; b += 64) __builtin_prefetch(soon + b);
  return soon + BYTES;
}

// Whole pages: scores[g * stride + t] = q[g] . rows[t], for t < count rounded up to eights; q in the order of `half`.
template <class Numbers, int G>
[[gnu::noinline]] static void score(const uint8_t* rows, int count, int dim, const float* q, float* scores, int stride,
                                    const uint8_t* soon) {
  const int64_t row_bytes = Numbers::row_bytes(dim);
  for (int t0 = 0; t0 < count; t0 += 8) {
    f32x8 sums[G][2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const uint8_t* four_rows[4];  // beyond the last row, the last row again
#pragma GCC unroll 4
      for (int t = 0; t < 4; t++) four_rows[t] = rows + std::min(t0 + 4 * i + t, count - 1) * row_bytes;
      f32x8 four[G][4] = {};
      for (int u = 0; u < dim / 16; u++) {
        if (soon) soon = fetch<4 * 16 * Numbers::BYTES>(soon);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
          f32x8 query[G];
#pragma GCC unroll 4
          for (int g = 0; g < G; g++) hold(query[g] = load(q + g * dim + 16 * u + 8 * half));
#pragma GCC unroll 4
          for (int t = 0; t < 4; t++) {
            const f32x8 x = Numbers::half(four_rows[t], u, half);
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) add_product(four[g][t], x, query[g]);
          }
        }
      }
#pragma GCC unroll 4
      for (int g = 0; g < G; g++)
        sums[g][i] = add_neighbours(add_neighbours(four[g][0], four[g][1]), add_neighbours(four[g][2], four[g][3]));
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) store(scores + g * stride + t0, add_halves(sums[g][0], sums[g][1]));
  }
}

// Whole pages: numbers [16 u, 16 (u + U)) of out[g] = out[g] * decay[g] + sum over t of weights[t * G + g] * rows[t];
// heads `width` apart. A weight fills a vector, so that it can be multiplied from memory: registers are for the sums.
template <class Numbers, int U, int G>
[[gnu::noinline]] static void accumulate(const uint8_t* rows, int count, int dim, int u, const f32x8* weights,
                                         const float* decay, float* out, int width, const uint8_t* soon) {
  const int64_t row_bytes = Numbers::row_bytes(dim);
  f32x8 sums[G][2 * U] = {};
  for (int t = 0; t < count; t++, rows += row_bytes, weights += G) {
    if (soon) soon = fetch<U * 16 * Numbers::BYTES>(soon);
#pragma GCC unroll 4
    for (int v = 0; v < 2 * U; v++) {
      const f32x8 x = Numbers::half(rows, u + v / 2, v % 2);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) add_product(sums[g][v], x, weights[g]);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; g++)
#pragma GCC unroll 4
    for (int v = 0; v < 2 * U; v += 2) {
      if (Numbers::WIDTH == 2) zip(sums[g][v], sums[g][v + 1]);
      float* o = out + g * width + 16 * u + 8 * v;
      store(o, load(o) * decay[g] + sums[g][v]);
      store(o + 8, load(o + 8) * decay[g] + sums[g][v + 1]);
    }
}

// Packed pages: scores[g * stride + t] = q[g] . codes[t] * factors[g] + bias[g], for t < count rounded up to eights; q
// in the order of the codes' vectors.
template <class Codes, int G>
[[gnu::noinline]] static void score_words(const uint8_t* codes, int count, int dim, const int16_t* q, int width,
                                          const float* factors, const float* bias, float* scores, int stride,
                                          Soon soon) {
  const int64_t row_bytes = Codes::row_bytes(dim);
  for (int t0 = 0; t0 < count; t0 += 8) {
    i32x8 sums[G][2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      // A vector has token t in its lower half and token t + 4 in its upper one.
      const uint8_t* row = codes + (t0 + 2 * i) * row_bytes;
      i32x8 a[G] = {}, b[G] = {};
      for (int at = (t0 + 4 * i) * soon.token_bytes; at < (t0 + 4 * i + 4) * soon.token_bytes; at += 64)
        __builtin_prefetch(soon.start + at);
      for (int u = 0; u < width / (8 * Codes::WIDTH); u++) {
        const typename Codes::Keys x(row, row + 4 * row_bytes, dim, u);
        const typename Codes::Keys y(row + row_bytes, row + 5 * row_bytes, dim, u);
#pragma GCC unroll 8
        for (int v = 0; v < Codes::WIDTH; v++) {
          const i16x16 x_codes = (i16x16)x.codes(v), y_codes = (i16x16)y.codes(v);
#pragma GCC unroll 4
          for (int g = 0; g < G; g++) {
            const i16x16 query = load_twice(q + ((u * Codes::WIDTH + v) * G + g) * 8);
            add_products(a[g], x_codes, query);
            add_products(b[g], y_codes, query);
          }
        }
      }
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) sums[g][i] = add_neighbours(a[g], b[g]);
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
      store(scores + g * stride + t0, to_float(add_neighbours(sums[g][0], sums[g][1])) * factors[g] + bias[g]);
  }
}

// Packed pages: a slice of out[g] = out[g] * decay[g] + sum over t of weights[t, g] * codes[t] * factors[g], in the
// order of the codes' vectors. The weights of two slots fill a vector, heads next to each other.
template <class Codes, int HALF, int G>
[[gnu::noinline]] static void accumulate_slice(const uint8_t* codes, int count, int dim, int slice,
                                               const i16x16* weights, const float* factors, const float* decay,
                                               float* out, int width) {
  const int64_t row_bytes = Codes::row_bytes(dim);
  i32x8 sums[G][4] = {};
  for (int t = 0; t < count; t += 2, codes += 2 * row_bytes, weights += G) {
    const typename Codes::template Values<HALF> x(codes, codes + row_bytes, dim, slice);
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      const i16x16 x_codes = (i16x16)x.codes(v);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) add_products(sums[g][v], x_codes, weights + g);
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
static void accumulate_words(const uint8_t* codes, int count, int dim, const i16x16* weights, const float* factors,
                             const float* decay, float* out, int width) {
  for (int slice = 0; slice < Codes::slices(dim); slice++)
    (slice % 2 ? accumulate_slice<Codes, 1, G> : accumulate_slice<Codes, 0, G>)(
        codes, count, dim, slice, weights, factors, decay, out, width);
}
