// New keys or values of one layer to their places in a slab. Flat C function for ctypes; tensors are checked in ops.py.
#include "parallel.h"
#include "vectors.h"

namespace {

constexpr int64_t ROWS = 64;  // that a thread takes at once

struct Write {
  void* slab;
  bool slab_bf16, rows_bf16;
  const int64_t* places;  // [lanes, tokens] numbers of the slab before a row
  const void* rows;       // [tokens, lanes, D] with strides in numbers
  int64_t token_stride, lane_stride, tokens, count;
  int dim;

  int state() const { return 0; }

  void operator()(int, int64_t piece) const {
    for (int64_t i = piece * ROWS; i < count && i < (piece + 1) * ROWS; i++) {
      const int64_t from = i % tokens * token_stride + i / tokens * lane_stride, to = places[i];
      for (int d = 0; d < dim; d += 8) write(to + d, read(from + d));
    }
  }

  f32x8 read(int64_t at) const {
    return rows_bf16 ? (f32x8)(widen((const uint16_t*)rows + at) << 16) : load((const float*)rows + at);
  }

  void write(int64_t at, f32x8 x) const {
    if (slab_bf16)
      store_bf16((uint16_t*)slab + at, x);
    else
      store((float*)slab + at, x);
  }
};

}  // namespace

extern "C" void kvb_write_rows(void* slab, int slab_bf16, const int64_t* places, const void* rows, int rows_bf16,
                               int64_t token_stride, int64_t lane_stride, int lanes, int64_t tokens, int dim,
                               int threads) {
  const int64_t count = lanes * tokens;
  Write work = {slab, slab_bf16 != 0, rows_bf16 != 0, places, rows, token_stride, lane_stride, tokens, count, dim};
  parallel((count + ROWS - 1) / ROWS, threads, work);
}
