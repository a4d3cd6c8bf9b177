// Keys or values of one page to codes, scales and minima; kvcache/quantize/pages.py is the specification.
//
// The tile is transposed, [D][T]: a column's target is its numbers plus the weighted errors of the columns before it,
// all of them rows of the tile, T numbers wide. A row holds numbers until it is rounded, and their errors from then on.
#pragma once
#include <vector>

#include "page.h"
#include "vectors.h"

typedef uint8_t u8x32 __attribute__((vector_size(32)));

constexpr float HALF_MAX = 65504.f;
constexpr float TWO_BIT_SPAN = 0.8f;

static inline f32x8 smaller(f32x8 a, f32x8 b) { return a < b ? a : b; }

static inline f32x8 clamp(f32x8 x, float low, float high) { return smaller(larger(x, splat(low)), splat(high)); }

// The smallest float16 that is not below x, or nearly so; the specification's `_round_up`.
static inline f32x8 half_above(f32x8 x) {
  const f32x8 nearest = through_half(x);
  const f32x8 magnitude = x < 0.f ? -x : x;
  const f32x8 raised = smaller(x + magnitude * 0x1p-10f + 0x1p-24f, splat(HALF_MAX));
  return nearest < x ? through_half(raised) : nearest;
}

// Where a page's rows come from, of 4 or 2 bytes a number (floats, bfloat16): kvcache/kernels/page_tokens.py.
struct Source {
  const void *chunk, *held;
  int chunk_bytes, held_bytes;
  int64_t lane_tokens, lane_stride;  // of the chunk; the stride in numbers
  int dim;

  // Row n as floats, where it lies or in `room`.
  const float* row(int64_t n, float* room) const {
    const int64_t at = n < 0 ? ~n * dim : n / lane_tokens * lane_stride + n % lane_tokens * dim;
    const void* base = n < 0 ? held : chunk;
    if ((n < 0 ? held_bytes : chunk_bytes) == 4) return (const float*)base + at;
    for (int d = 0; d < dim; d += 8) store(room + d, (f32x8)(widen((const uint16_t*)base + at + d) << 16));
    return room;
  }
};

// Minimum, scale and its inverse of every group; groups are padded to eight.
struct Groups {
  std::vector<float> low, high, minimum, scale, inverse;

  void resize(int count) {
    for (auto* part : {&low, &high, &minimum, &scale, &inverse}) part->assign(round_up(count), 0.f);
  }

  // From `low` and `high`; writes the two float16 sections.
  void settle(int count, int bits, uint8_t* scales, uint8_t* minima) {
    const float top = (1 << bits) - 1;
    uint16_t halves[8];
    for (int i = 0; i < count; i += 8) {
      const size_t bytes = 2 * (count - i < 8 ? count - i : 8);
      f32x8 a = load(&low[i]), b = load(&high[i]);
      if (bits == 2) {
        const f32x8 middle = (a + b) / 2.f, half = (b - a) * (TWO_BIT_SPAN / 2);
        a = middle - half, b = middle + half;
      }
      const f32x8 smallest = -half_above(-a), step = half_above((b - smallest) / top);
      store(&minimum[i], smallest);
      store(&scale[i], step);
      store(&inverse[i], step > 0.f ? 1.f / step : f32x8{});
      to_half(step, halves);
      memcpy(scales + 2 * i, halves, bytes);
      to_half(smallest, halves);
      memcpy(minima + 2 * i, halves, bytes);
    }
  }
};

class Quantize {
 public:
  Quantize(int dim, int tokens) : dim_(dim), tokens_(tokens), tile_(dim * tokens), rows_(8 * dim), codes_(dim * tokens) {}

  // `per_channel`: one scale for each of D columns, otherwise one for each of T tokens. `weights` [D][D] may be null.
  void run(const Source& source, const int64_t* rows, const float* weights, int bits, bool per_channel, uint8_t* codes,
           uint8_t* scales, uint8_t* minima) {
    for (int t = 0; t < tokens_; t += 8) {
      const float* row[8];
      for (int k = 0; k < 8; k++) row[k] = source.row(rows[t + k], &rows_[k * dim_]);
      for (int d = 0; d < dim_; d++) {
        f32x8 x;
        for (int k = 0; k < 8; k++) x[k] = row[k][d];
        store(&tile_[d * tokens_ + t], x);
      }
    }
    const int count = per_channel ? dim_ : tokens_;
    groups_.resize(count);
    per_channel ? channel_ranges() : token_ranges();
    groups_.settle(count, bits, scales, minima);
    int t = 0;
    for (; t + 64 <= tokens_; t += 64) round<8>(t, weights, bits, per_channel);
    for (; t < tokens_; t += 16) round<2>(t, weights, bits, per_channel);
    const int row_bytes = dim_ * bits / 8;
    if (bits == 3) {
      pack(2, 0, row_bytes, codes);
      pack(1, 2, row_bytes, codes + dim_ / 4);
    } else {
      pack(bits, 0, row_bytes, codes);
    }
  }

 private:
  f32x8 column(int d, int t) { return clamp(load(&tile_[d * tokens_ + t]), -HALF_MAX, HALF_MAX); }

  void channel_ranges() {
    for (int d = 0; d < dim_; d++) {
      f32x8 low = column(d, 0), high = low;
      for (int t = 8; t < tokens_; t += 8) {
        low = smaller(low, column(d, t));
        high = larger(high, column(d, t));
      }
      groups_.low[d] = -max_of(-low);
      groups_.high[d] = max_of(high);
    }
  }

  void token_ranges() {
    for (int t = 0; t < tokens_; t += 8) {
      f32x8 low = column(0, t), high = low;
      for (int d = 1; d < dim_; d++) {
        low = smaller(low, column(d, t));
        high = larger(high, column(d, t));
      }
      store(&groups_.low[t], low);
      store(&groups_.high[t], high);
    }
  }

  // Rounds the columns of tokens [t, t + 8 V) in order.
  template <int V>
  void round(int t, const float* weights, int bits, bool per_channel) {
    const float top = (1 << bits) - 1;
    const f32x8 magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to the nearest integer, half to even
    for (int d = 0; d < dim_; d++) {
      f32x8 made_up[V] = {};
      if (weights)
        for (int before = 0; before < d; before++) {
          const f32x8 weight = splat(weights[d * dim_ + before]);
          for (int v = 0; v < V; v++) made_up[v] += load(&tile_[before * tokens_ + t + 8 * v]) * weight;
        }
      for (int v = 0; v < V; v++) {
        const int i = d * tokens_ + t + 8 * v;
        const int group = t + 8 * v;
        const f32x8 minimum = per_channel ? splat(groups_.minimum[d]) : load(&groups_.minimum[group]);
        const f32x8 scale = per_channel ? splat(groups_.scale[d]) : load(&groups_.scale[group]);
        const f32x8 inverse = per_channel ? splat(groups_.inverse[d]) : load(&groups_.inverse[group]);
        const f32x8 x = column(d, t + 8 * v);
        const f32x8 rounded = clamp((x + made_up[v] - minimum) * inverse, 0.f, top) + magic;
        store(&tile_[i], x - (minimum + (rounded - magic) * scale));
        const u8x32 code = (u8x32)rounded;  // each float's lowest byte
        const u8x32 low = SHUFFLE(u8x32, code, code, 0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                  0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
        memcpy(&codes_[i], &low, 8);
      }
    }
  }

  // Puts bits [shift, shift + bits) of every code at the head of its token's row, the first code lowest, 16 bits of
  // eight tokens at a time.
  void pack(int bits, int shift, int row_bytes, uint8_t* out) {
    const int joined = 16 / bits;
    const uint32_t mask = (1 << bits) - 1;
    for (int pair = 0; pair < dim_ / joined; pair++)
      for (int t = 0; t < tokens_; t += 8) {
        u32x8 packed = {};
        for (int j = 0; j < joined; j++)
          packed |= (widen(&codes_[(pair * joined + j) * tokens_ + t]) >> shift & mask) << (bits * j);
        for (int k = 0; k < 8; k++) {
          const uint16_t two = (uint16_t)packed[k];
          memcpy(out + (int64_t)(t + k) * row_bytes + 2 * pair, &two, 2);
        }
      }
  }

  const int dim_, tokens_;
  std::vector<float> tile_, rows_;
  std::vector<uint8_t> codes_;
  Groups groups_;
};
