// Products of rows with packed weights, both of float32 or bfloat16. Flat C functions for ctypes; checks are in ops.py.
//
// The weights lie in panels of PANEL outputs; a panel holds, for every STEP inputs, STEP numbers of each output
// (engine/kernels/packed.py). An output is summed in the order of its inputs, in float32, by the same instructions however
// rows and panels are shared out: a row's result depends on nothing but the row.
#include <memory>

#include "elements.h"
#include "kernels.h"
#include "panels.h"
#include "wide.h"

namespace {

#if defined(__AVX512F__)
constexpr int VECTORS = 4;  // 6 × 4 sums, 4 vectors of weights and 1 of a row: of 32 registers
#else
constexpr int VECTORS = 2;  // 6 × 2 sums, 2 vectors of weights and 1 of a row: of 16
#endif
constexpr int PANEL = VECTORS * WIDE;
constexpr int BLOCK_BYTES = 36 << 10;  // of a panel at once: they stay near the first-level cache

// The first or the second of each two bfloat16 numbers.
Wide half_of(WideBits both, int part) { return (Wide)(part ? both & 0xffff0000u : both << 16); }

// What is multiplied: STEP inputs at once, in so many PARTS.
struct Floats {
  typedef float Input;
  typedef float Weight;
  static constexpr int STEP = 1, PARTS = 1;

  static Wide weights(const float* p, int) { return load_wide(p); }
  static Wide input(const float* p, int) { return wide(*p); }
  static Wide add(Wide sum, Wide x, Wide weight) { return sum + x * weight; }
};

// Weights in bfloat16: products of the same numbers in the same order, so the same to the bit.
struct FloatsByHalves {
  typedef float Input;
  typedef bf16 Weight;
  static constexpr int STEP = 2, PARTS = 2;

  static Wide weights(const bf16* p, int part) { return half_of((WideBits)load_wide(p), part); }
  static Wide input(const float* p, int part) { return wide(p[part]); }
  static Wide add(Wide sum, Wide x, Wide weight) { return sum + x * weight; }
};

struct Halves {
  typedef bf16 Input;
  typedef bf16 Weight;
  static constexpr int STEP = 2;

  static WideBits both(const bf16* p) {
    uint32_t x;
    memcpy(&x, p, sizeof x);
    return WideBits{} + x;
  }

#if defined(__AVX512BF16__)
  static constexpr int PARTS = 1;

  static Wide weights(const bf16* p, int) { return load_wide(p); }
  static Wide input(const bf16* p, int) { return (Wide)both(p); }
  static Wide add(Wide sum, Wide x, Wide weight) {
    return (Wide)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weight);
  }
#else
  static constexpr int PARTS = 2;

  static Wide weights(const bf16* p, int part) { return half_of((WideBits)load_wide(p), part); }
  static Wide input(const bf16* p, int part) { return half_of((WideBits)held((Wide)both(p)), part); }
  static Wide add(Wide sum, Wide x, Wide weight) { return sum + x * weight; }
#endif
};

// sums[i] = x[i] . panel, for ROWS rows; added to what is there, if so.
template <class Kind, int ROWS>
__attribute__((noinline)) void tile(const typename Kind::Input* x, int64_t stride, const typename Kind::Weight* panel,
                                    int depth, bool adds, float (*out)[PANEL]) {
  if (depth < 1) __builtin_unreachable();  // else the compiler spills the sums to join them with those of no step
  Wide sums[ROWS][VECTORS];
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) sums[i][j] = adds ? load_wide(out[i] + j * WIDE) : wide(0);
  for (int k = 0; k < depth; k += Kind::STEP, panel += Kind::STEP * PANEL) {
#pragma GCC unroll 2
    for (int part = 0; part < Kind::PARTS; part++) {
      Wide weights[VECTORS];
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) weights[j] = held(Kind::weights(panel + j * Kind::STEP * WIDE, part));
#pragma GCC unroll 6
      for (int i = 0; i < ROWS; i++) {
        const Wide number = Kind::input(x + i * stride + k, part);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) sums[i][j] = held(Kind::add(sums[i][j], number, weights[j]));
      }
      if (Kind::PARTS > 1) asm volatile("" ::: "memory");  // the next part's numbers wait for registers
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) store_wide(out[i] + j * WIDE, sums[i][j]);
}

template <class Kind, class Out>
struct Product {
  typedef float Sums[TASK_ROWS][PANEL];

  const typename Kind::Input* x;        // [rows, depth]
  const typename Kind::Weight* panels;  // [panels, depth / STEP, PANEL, STEP], the last one padded
  const float* bias;                    // [width] or null
  int64_t num_rows;
  int depth, width;
  Out* out;  // [rows, width]
  bool adds;  // to what is there

  std::unique_ptr<Sums> state() const { return std::unique_ptr<Sums>((Sums*)new Sums); }

  void operator()(std::unique_ptr<Sums>& sums, const Task& task) const {
    constexpr int BLOCK = BLOCK_BYTES / PANEL / sizeof(typename Kind::Weight);
    for (int panel = task.panel; panel < task.last; panel++) {
      for (int k = 0; k < depth; k += BLOCK)
        by_tile(task.first, task.end, [&](auto rows, int64_t row) {
          tile<Kind, decltype(rows)::value>(x + row * depth + k, depth, panels + ((int64_t)panel * depth + k) * PANEL,
                                            std::min(BLOCK, depth - k), k > 0, *sums + (row - task.first));
        });
      for (int64_t row = task.first; row < task.end; row++) finish((*sums)[row - task.first], panel * PANEL, row);
    }
  }

  void finish(const float* sums, int column, int64_t row) const {
    Out* to = out + row * width + column;
    const float* more = bias ? bias + column : nullptr;
    int j = 0;
    for (; j + 8 <= std::min(PANEL, width - column); j += 8) put(sums + j, more ? more + j : nullptr, to + j);
    if (const int rest = std::min(PANEL, width - column) - j) {  // of a width that is no multiple of 8
      Out room[8] = {};
      float some[8] = {};
      memcpy(room, to + j, rest * sizeof(Out));
      if (more) memcpy(some, more + j, rest * sizeof(float));
      put(sums + j, some, room);
      memcpy(to + j, room, rest * sizeof(Out));
    }
  }

  void put(const float* sums, const float* bias, Out* to) const {
    f32x8 y = load(sums);
    if (bias) y += load(bias);
    write(to, adds ? read(to) + y : y);
  }
};

template <class Kind, class Out>
void product(const void* x, const void* panels, const float* bias, int64_t num_rows, int depth, int width, void* out,
             bool adds, int threads) {
  typedef typename Kind::Weight Weight;
  const Product<Kind, Out> work = {(const typename Kind::Input*)x, (const Weight*)panels, bias, num_rows, depth, width,
                                   (Out*)out, adds};
  Sharing<Product<Kind, Out>>(work, num_rows, (width + PANEL - 1) / PANEL, PANEL * depth * sizeof(Weight), threads);
}

}  // namespace

extern "C" {

// Outputs in a panel; 0 where the vector library's product was not found slower: it was with AVX2 and with AVX-512.
int kvb_float_panel() {
#if (defined(__AVX2__) && defined(__FMA__)) || defined(__AVX512F__)
  return PANEL;
#else
  return 0;
#endif
}

// `types` names what is of bfloat16: 1 the rows, 2 the weights, 4 what comes out.
void kvb_float_product(int types, const void* x, const void* panels, const float* bias, int64_t num_rows, int depth,
                       int width, void* out, int adds, int threads) {
  auto multiply = types == 0   ? product<Floats, float>
                  : types == 2 ? product<FloatsByHalves, float>
                  : types == 3 ? product<Halves, float>
                               : product<Halves, bf16>;
  multiply(x, panels, bias, num_rows, depth, width, out, adds != 0, threads);
}

}
