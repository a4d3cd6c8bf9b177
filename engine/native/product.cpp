// Products of float32 rows with packed float32 weights. Flat C functions for ctypes; checks are in ops.py.
//
// The weights lie in panels of PANEL outputs; a panel holds, for every input, its outputs' numbers side by side
// (engine/native/packed.py). An output is summed in the order of its inputs, one fused multiplication and addition at a
// time, however rows and panels are shared out: a row's result depends on nothing but the row.
#include "elements.h"
#include "panels.h"

namespace {

constexpr int PANEL = 16;   // 6 × 2 sums, 2 numbers of weights and 1 of a row: of AVX2's 16 registers
constexpr int DEPTH = 576;  // inputs at once: 36 KB of a panel stay near the first-level cache

// out[i] = start[i] + x[i] . panel, for ROWS rows.
template <int ROWS>
__attribute__((noinline)) void tile(const float* x, int64_t x_stride, const float* panel, int depth,
                                    const float* start, int64_t start_stride, float* out, int64_t out_stride) {
  f32x8 sums[ROWS][2];
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++) {
    sums[i][0] = load(start + i * start_stride);
    sums[i][1] = load(start + i * start_stride + 8);
  }
#pragma GCC unroll 4
  for (int k = 0; k < depth; k++, panel += PANEL) {
    const f32x8 low = rounded(load(panel)), high = rounded(load(panel + 8));  // in registers, for all rows
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
      const f32x8 number = x[i * x_stride + k] - f32x8{};  // not +, which would make 0 of -0 and so cost an addition
      sums[i][0] += number * low;
      sums[i][1] += number * high;
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++) {
    store(out + i * out_stride, sums[i][0]);
    store(out + i * out_stride + 8, sums[i][1]);
  }
}

struct Product {
  const float* x;       // [rows, depth]
  const float* panels;  // [width / PANEL, depth, PANEL]
  const float* bias;    // [width] or null
  int depth, width;
  float* out;  // [rows, width]
  bool adds;   // to what is there; without bias

  int state() const { return 0; }

  void operator()(int, const Task& task) const {
    for (int k = 0; k < depth; k += DEPTH)
      for (int panel = task.panel; panel < task.last; panel++)
        by_tile(task.first, task.end, [&](auto rows, int64_t row) { run<decltype(rows)::value>(row, panel, k); });
  }

  template <int ROWS>
  void run(int64_t row, int panel, int k) const {
    static const float zeros[PANEL] = {};
    float* to = out + row * width + panel * PANEL;
    const bool goes_on = adds || k > 0;
    tile<ROWS>(x + row * depth + k, depth, panels + ((int64_t)panel * depth + k) * PANEL, std::min(DEPTH, depth - k),
               goes_on ? to : bias ? bias + panel * PANEL : zeros, goes_on ? width : 0, to, width);
  }
};

}  // namespace

extern "C" {

// Outputs in a panel; 0 where the vector library's product was not found slower: only 256-bit registers were measured.
int kvb_float_panel() {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  return PANEL;
#else
  return 0;
#endif
}

void kvb_float_product(const float* x, const float* panels, const float* bias, int64_t num_rows, int depth, int width,
                       float* out, int adds, int threads) {
  const Product work = {x, panels, bias, depth, width, out, adds != 0};
  Sharing<Product>(work, num_rows, width / PANEL, 4 * PANEL * depth, threads);
}

}
