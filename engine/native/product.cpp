// Products of float32 rows with packed weights. Flat C functions for ctypes; checks are in ops.py.
//
// The weights lie in panels of PANEL outputs; a panel holds, for every input, its outputs' numbers side by side
// (engine/native/packed.py). An output is summed in the order of its inputs, one fused multiplication and addition at a
// time, however rows and panels are shared out: a row's result depends on nothing but the row.
#include "elements.h"
#include "kernels.h"
#include "panels.h"

namespace {

constexpr int PANEL = 16;   // 6 × 2 sums, 2 numbers of weights and 1 of a row: of AVX2's 16 registers
constexpr int DEPTH = 576;  // inputs at once: 36 KB of a panel stay near the first-level cache

// A panel's weights for one input.
void read(const float* p, f32x8& low, f32x8& high) {
  low = load(p);
  high = load(p + 8);
}

void read(const bf16* p, f32x8& low, f32x8& high) {
  u32x8 both;
  memcpy(&both, p, sizeof both);
  low = (f32x8)(both << 16);
  high = (f32x8)(both & 0xffff0000u);
}

// out[i] = start[i] + x[i] . panel, for ROWS rows.
template <int ROWS, class Weight>
__attribute__((noinline)) void tile(const float* x, int64_t x_stride, const Weight* panel, int depth,
                                    const float* start, int64_t start_stride, float* out, int64_t out_stride) {
  f32x8 sums[ROWS][2];
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++) {
    sums[i][0] = load(start + i * start_stride);
    sums[i][1] = load(start + i * start_stride + 8);
  }
#pragma GCC unroll 4
  for (int k = 0; k < depth; k++, panel += PANEL) {
    f32x8 low, high;
    read(panel, low, high);
    hold(low), hold(high);  // in registers, for all rows
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

template <class Weight>
struct Product {
  const float* x;        // [rows, depth]
  const Weight* panels;  // [width / PANEL, depth, PANEL]
  const float* bias;     // [width] or null
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
    tile<ROWS, Weight>(x + row * depth + k, depth, panels + ((int64_t)panel * depth + k) * PANEL, std::min(DEPTH, depth - k),
               goes_on ? to : bias ? bias + panel * PANEL : zeros, goes_on ? width : 0, to, width);
  }
};

template <class Weight>
void product(const float* x, const void* panels, const float* bias, int64_t num_rows, int depth, int width, float* out,
             bool adds, int threads) {
  const Product<Weight> work = {x, (const Weight*)panels, bias, depth, width, out, adds};
  Sharing<Product<Weight>>(work, num_rows, width / PANEL, PANEL * depth * sizeof(Weight), threads);
}

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

void kvb_float_product(int is_bf16, const float* x, const void* panels, const float* bias, int64_t num_rows, int depth,
                       int width, float* out, int adds, int threads) {
  (is_bf16 ? product<bf16> : product<float>)(x, panels, bias, num_rows, depth, width, out, adds != 0, threads);
}

}
