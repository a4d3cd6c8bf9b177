// Products of int8 rows with int8 weights, summed exactly in int32. Flat C functions for ctypes; checks are in ops.py.
//
// The weights lie in panels of PANEL output columns; a panel holds, for every GROUP inputs, GROUP numbers of each column
// (engine/kernels/int8.py). The sums of a tile of rows and a panel's columns stay in registers over all inputs.
#include <memory>

#include "elements.h"
#include "kernels.h"
#include "panels.h"

namespace {

// vpdpbusd multiplies unsigned by signed numbers, so inputs are raised by 128 there, and 128 times the sum of a
// column's weights is where its sums begin. KVB_EMULATE_VNNI: that way in plain C++, for tests. Without it pairs of 16
// bits are multiplied: 1.6 times as many a second as floats, and a quarter more than of 8 bits, which would have to be
// signed and widened one by one.
#if defined(__AVX512VNNI__) || defined(KVB_EMULATE_VNNI)
constexpr bool RAISED = true;
constexpr int LANES = 16, VECTORS = 4;  // 24 sums, 4 numbers of weights, 1 of a row: of 32 registers
typedef int8_t Input;
#else
constexpr bool RAISED = false;
constexpr int LANES = 8, VECTORS = 2;  // 12 sums, 2 numbers of weights, 1 of a row, 1 in between: of 16
typedef int16_t Input;
#endif
constexpr int PANEL = LANES * VECTORS;
constexpr int GROUP = 4 / sizeof(Input);

typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef int8_t Codes __attribute__((vector_size(GROUP * LANES)));
typedef Input Inputs __attribute__((vector_size(4 * LANES)));

// GROUP weights of each column.
Ints weights_of(const int8_t* p) {
  Codes x;
  memcpy(&x, p, sizeof x);
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(KVB_EMULATE_VNNI)
  return (Ints)_mm256_cvtepi8_epi16((__m128i)x);  // which the compiler does in four steps
#else
  return (Ints)__builtin_convertvector(x, Inputs);
#endif
}

// GROUP numbers of a row, the same in every lane.
Ints group_of(const Input* row) {
  int32_t group;
  memcpy(&group, row, 4);
  return Ints{} + group;
}

// sums[lane] += the dot product of GROUP inputs and GROUP weights.
Ints dot(Ints sums, Ints inputs, Ints weights) {
#if defined(__AVX512VNNI__) && !defined(KVB_EMULATE_VNNI)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)inputs, (__m512i)weights);
#elif defined(__AVX2__) && !defined(KVB_EMULATE_VNNI)
  return sums + (Ints)_mm256_madd_epi16((__m256i)inputs, (__m256i)weights);
#else
  Input a[GROUP * LANES], w[GROUP * LANES];
  memcpy(a, &inputs, sizeof a);
  memcpy(w, &weights, sizeof w);
  for (int i = 0; i < GROUP * LANES; i++) sums[i / GROUP] += (RAISED ? (int)(uint8_t)a[i] : (int)a[i]) * w[i];
  return sums;
#endif
}

template <int ROWS>
__attribute__((noinline)) void tile(const Input* rows, int depth, const int8_t* panel, const int32_t* starts,
                                    int32_t (*out)[PANEL]) {
  Ints sums[ROWS][VECTORS];
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
      sums[i][j] = Ints{};
      if (RAISED) memcpy(&sums[i][j], starts + j * LANES, sizeof(Ints));
    }
  for (int k = 0; k < depth; k += GROUP, panel += GROUP * PANEL) {
    Ints weights[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) weights[j] = weights_of(panel + j * GROUP * LANES);
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
      const Ints inputs = group_of(rows + (int64_t)i * depth + k);
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) sums[i][j] = dot(sums[i][j], inputs, weights[j]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) memcpy(out[i] + j * LANES, &sums[i][j], sizeof(Ints));
}

template <class T>
struct Product {
  const int8_t* codes;  // [rows, depth]
  const float* scales;  // [rows]
  const int8_t* panels;
  const float* weight_scales;  // these three padded to whole panels
  const int32_t* starts;
  const float* bias;  // or null
  int64_t num_rows;
  int depth, width;
  T* out;  // [rows, width]
  bool adds;  // to what is there

  // Room for a task's rows, not filled.
  std::unique_ptr<Input[]> state() const {
    return std::unique_ptr<Input[]>(new Input[std::min<int64_t>(num_rows, TASK_ROWS) * depth]);
  }

  void operator()(std::unique_ptr<Input[]>& rows, const Task& task) const {
    const int8_t* from = codes + task.first * depth;
    for (int64_t i = 0; i < (task.end - task.first) * depth; i++) rows[i] = RAISED ? (Input)(from[i] ^ 0x80) : from[i];
    for (int panel = task.panel; panel < task.last; panel++)
      by_tile(task.first, task.end, [&](auto count, int64_t row) {
        run<decltype(count)::value>(&rows[(row - task.first) * depth], row, panel);
      });
  }

  template <int ROWS>
  void run(const Input* rows, int64_t row, int64_t panel) const {
    int32_t sums[ROWS][PANEL];
    const int64_t column = panel * PANEL;
    tile<ROWS>(rows, depth, panels + column * depth, starts + column, sums);
    for (int i = 0; i < ROWS; i++) finish(sums[i], column, scales[row + i], out + (row + i) * width + column);
  }

  void finish(const int32_t* sums, int64_t column, float scale, T* to) const {
    for (int j = 0; j < PANEL && column + j < width; j += 8) {
      i32x8 integers;
      memcpy(&integers, sums + j, sizeof integers);
      f32x8 x = __builtin_convertvector(integers, f32x8) * load(weight_scales + column + j);
      x = rounded(x * scale);
      if (bias) x = rounded(x + load(bias + column + j));
      write(to + j, adds ? read(to + j) + x : x);
    }
  }
};

template <class T>
void product(const int8_t* codes, const float* scales, const int8_t* panels, const float* weight_scales,
             const int32_t* starts, const float* bias, int64_t num_rows, int depth, int width, T* out, bool adds,
             int threads) {
  const Product<T> work = {codes, scales, panels, weight_scales, starts, bias, num_rows, depth, width, out, adds};
  // Rows are widened for each task: of deep weights it gets four panels at least, to be worth it.
  const int64_t panel_bytes = std::min(PANEL * depth, TASK_BYTES / 4);
  Sharing<Product<T>>(work, num_rows, (width + PANEL - 1) / PANEL, panel_bytes, threads);
}

}  // namespace

extern "C" {

int kvb_int8_panel() { return PANEL; }

int kvb_int8_group() { return GROUP; }

void kvb_int8_product(int is_bf16, const int8_t* codes, const float* scales, const int8_t* panels,
                      const float* weight_scales, const int32_t* starts, const float* bias, int64_t num_rows,
                      int depth, int width, void* out, int adds, int threads) {
  if (is_bf16)
    product(codes, scales, panels, weight_scales, starts, bias, num_rows, depth, width, (bf16*)out, adds, threads);
  else
    product(codes, scales, panels, weight_scales, starts, bias, num_rows, depth, width, (float*)out, adds, threads);
}

}
