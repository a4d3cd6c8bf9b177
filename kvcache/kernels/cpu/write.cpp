// New keys or values of one layer to their places in a slab. Flat C function for ctypes; tensors are checked in ops.py.
#include "parallel.h"
#include "vectors.h"

namespace {

constexpr int64_t ROWS = 64;  // of a piece, which one thread takes at once

struct Write {
  void* slab;
  bool slab_bf16, rows_bf16;
  const int64_t* places;  // [lanes, tokens] numbers of the slab before a row
  const void* rows;       // [tokens, lanes, D] with strides in numbers
  int64_t token_stride, lane_stride, tokens, count;
  int dim;

  int state() const { return 0; }

  void operator()(int, int64_t piece) const {
    if (slab_bf16 == rows_bf16)
      slab_bf16 ? copy<uint16_t>(piece) : copy<float>(piece);
    else
      convert(piece);
  }

  // Calls use(place, offset of a row) with everything in locals, since the compiler must assume that a stored number
  // changes a member.
  template <class Use>
  void for_rows(int64_t piece, Use use) const {
    const int64_t first = piece * ROWS, num_tokens = tokens, token_step = token_stride, lane_step = lane_stride;
    const int64_t* place = places + first;
    const int num_rows = (int)(count - first < ROWS ? count - first : ROWS);
    int64_t lane = first / num_tokens, token = first % num_tokens;
    for (int i = 0; i < num_rows; i++) {
      use(place[i], token * token_step + lane * lane_step);
      if (++token == num_tokens) token = 0, lane++;
    }
  }

  template <class Number>
  void copy(int64_t piece) const {
    Number* to = (Number*)slab;
    const Number* from = (const Number*)rows;
    const size_t bytes = dim * sizeof(Number);
    for_rows(piece, [=](int64_t place, int64_t row) { memcpy(to + place, from + row, bytes); });
  }

  void convert(int64_t piece) const {
    const int width = dim;
    if (slab_bf16)
      for_rows(piece, [=, to = (uint16_t*)slab, from = (const float*)rows](int64_t place, int64_t row) {
        for (int d = 0; d < width; d += 8) store_bf16(to + place + d, load(from + row + d));
      });
    else
      for_rows(piece, [=, to = (float*)slab, from = (const uint16_t*)rows](int64_t place, int64_t row) {
        for (int d = 0; d < width; d += 8) store(to + place + d, (f32x8)(widen(from + row + d) << 16));
      });
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
