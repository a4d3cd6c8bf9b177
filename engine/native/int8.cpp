// Products of int8 rows with int8 weights, summed exactly in int32. Flat C functions for ctypes; checks are in ops.py.
//
// The weights lie in panels of PANEL output columns; a panel holds, for every four inputs, four numbers of each column
// (engine/native/int8.py). The sums of a tile of rows and a panel's columns stay in registers over all inputs.
#include <vector>

#include "elements.h"
#include "parallel.h"

namespace {

// vpdpbusd multiplies unsigned by signed numbers, so inputs are raised by 128 there, and 128 times the sum of a
// column's weights is where its sums begin. KVB_EMULATE_VNNI: that way in plain C++, for tests.
#if defined(__AVX512VNNI__) || defined(KVB_EMULATE_VNNI)
constexpr bool RAISED = true;
constexpr int LANES = 16, VECTORS = 4, TILE_ROWS = 6;  // 24 sums, 4 numbers of weights, 1 of a row: of 32 registers
#else
constexpr bool RAISED = false;
constexpr int LANES = 8, VECTORS = 2, TILE_ROWS = 4;  // 8 sums, 2 of weights, 2 of a row, ones, 2 in between: of 16
#endif
constexpr int PANEL = LANES * VECTORS;
constexpr int TASK_ROWS = 16 * TILE_ROWS;
constexpr int TASK_BYTES = 64 << 10;  // of panels: half of what a small second level cache holds beside the rows

typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

Ints load_ints(const void* p) {
  Ints x;
  memcpy(&x, p, sizeof x);
  return x;
}

// Four numbers of a row, the same in every lane.
Ints four_of(const int8_t* row) {
  int32_t four;
  memcpy(&four, row, 4);
  return Ints{} + four;
}

// sums[lane] += the dot product of four inputs and four weights.
Ints dot(Ints sums, Ints inputs, Ints weights) {
#if defined(__AVX512VNNI__) && !defined(KVB_EMULATE_VNNI)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)inputs, (__m512i)weights);
#elif defined(__AVX2__) && !defined(KVB_EMULATE_VNNI)
  // |a| times w with the sign of a: two such products reach 2 * 127 * 127, which 16 bits hold.
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)inputs),
                                             _mm256_sign_epi8((__m256i)weights, (__m256i)inputs));
  return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  int8_t a[4 * LANES], w[4 * LANES];
  memcpy(a, &inputs, sizeof a);
  memcpy(w, &weights, sizeof w);
  for (int i = 0; i < 4 * LANES; i++) sums[i / 4] += (RAISED ? (int)(uint8_t)a[i] : (int)a[i]) * w[i];
  return sums;
#endif
}

template <int ROWS>
__attribute__((noinline)) void tile(const int8_t* rows, int depth, const int8_t* panel, const int32_t* starts,
                                    int32_t (*out)[PANEL]) {
  Ints sums[ROWS][VECTORS];
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) sums[i][j] = RAISED ? load_ints(starts + j * LANES) : Ints{};
  for (int k = 0; k < depth; k += 4, panel += 4 * PANEL) {
    Ints weights[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) weights[j] = load_ints(panel + j * 4 * LANES);
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
      const Ints inputs = four_of(rows + (int64_t)i * depth + k);
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
  int64_t panels_per_task, num_groups;

  std::vector<int8_t> state() const { return std::vector<int8_t>(RAISED ? (size_t)TASK_ROWS * depth : 0); }

  void operator()(std::vector<int8_t>& raised, int64_t task) const {
    const int64_t first = task / num_groups * TASK_ROWS, group = task % num_groups * panels_per_task;
    const int count = (int)(num_rows - first < TASK_ROWS ? num_rows - first : TASK_ROWS);
    const int8_t* rows = codes + first * depth;
    if (RAISED) {
      for (int64_t i = 0; i < (int64_t)count * depth; i++) raised[i] = (int8_t)(rows[i] ^ 0x80);
      rows = raised.data();
    }
    for (int64_t panel = group; panel < group + panels_per_task && panel * PANEL < width; panel++) {
      int i = 0;
      for (; i + TILE_ROWS <= count; i += TILE_ROWS) run<TILE_ROWS>(rows, first, i, panel);
      for (; i + 2 <= count; i += 2) run<2>(rows, first, i, panel);
      if (i < count) run<1>(rows, first, i, panel);
    }
  }

  template <int ROWS>
  void run(const int8_t* rows, int64_t first, int i, int64_t panel) const {
    int32_t sums[ROWS][PANEL];
    const int64_t column = panel * PANEL;
    tile<ROWS>(rows + (int64_t)i * depth, depth, panels + column * depth, starts + column, sums);
    for (int r = 0; r < ROWS; r++)
      finish(sums[r], column, scales[first + i + r], out + (first + i + r) * width + column);
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
  const int64_t per_task = TASK_BYTES / (PANEL * depth) > 1 ? TASK_BYTES / (PANEL * depth) : 1;
  const int64_t groups = ((width + PANEL - 1) / PANEL + per_task - 1) / per_task;
  Product<T> work = {codes, scales, panels, weight_scales, starts, bias,     num_rows,
                     depth, width,  out,    adds,          per_task, groups};
  parallel((num_rows + TASK_ROWS - 1) / TASK_ROWS * groups, threads, work);
}

}  // namespace

extern "C" {

int kvb_int8_panel() { return PANEL; }

void kvb_int8_product(int is_bf16, const int8_t* codes, const float* scales, const int8_t* panels,
                      const float* weight_scales, const int32_t* starts, const float* bias, int64_t num_rows,
                      int depth, int width, void* out, int adds, int threads) {
  if (is_bf16)
    product(codes, scales, panels, weight_scales, starts, bias, num_rows, depth, width, (bf16*)out, adds, threads);
  else
    product(codes, scales, panels, weight_scales, starts, bias, num_rows, depth, width, (float*)out, adds, threads);
}

}
