// Passes over a step's tokens, each number read and written once. Flat C functions for ctypes; checks are in ops.py.
//
// Float32 inside, whatever lies in memory. Where `codes` is given, a row goes there as int8 with its scale, and not to
// `out`.
#include <cmath>
#include <vector>

#include "elements.h"
#include "kernels.h"
#include "parallel.h"

namespace {

constexpr int64_t ROWS = 16;  // that a thread takes at once

// Calls work(row, scratch) for every row.
template <class Work>
struct ByRow {
  int64_t num_rows;
  int scratch;
  Work work;

  std::vector<float> state() const { return std::vector<float>(scratch); }
  void operator()(std::vector<float>& room, int64_t piece) const {
    for (int64_t row = piece * ROWS; row < num_rows && row < (piece + 1) * ROWS; row++) work(row, room.data());
  }
};

template <class Work>
void by_row(int64_t num_rows, int scratch, int threads, Work work) {
  ByRow<Work> rows = {num_rows, scratch, work};
  parallel((num_rows + ROWS - 1) / ROWS, threads, rows);
}

template <class T>
float inverse_norm(const T* x, int count, float eps) {
  f32x8 squares = splat(0.f);
  for (int i = 0; i < count; i += 8) squares += read(x + i) * read(x + i);
  return 1.f / sqrtf(sum_of(squares) / count + eps);
}

template <class T>
void rms_norm(const T* x, const T* weight, int64_t num_rows, int width, float eps, T* out, int8_t* codes,
              float* scales, int threads) {
  by_row(num_rows, width, threads, [=](int64_t row, float* room) {
    const T* from = x + row * width;
    const f32x8 factor = splat(inverse_norm(from, width, eps));
    for (int i = 0; i < width; i += 8) {
      const f32x8 y = read(from + i) * factor * read(weight + i);
      codes ? store(room + i, y) : write(out + row * width + i, y);
    }
    if (codes) quantize_row(room, width, codes + row * width, scales + row);
  });
}

template <class T>
void silu_mul(const T* gate_up, int64_t num_rows, int width, T* out, int8_t* codes, float* scales, int threads) {
  by_row(num_rows, width, threads, [=](int64_t row, float* room) {
    const T *gate = gate_up + row * 2 * width, *up = gate + width;
    for (int i = 0; i < width; i += 8) {
      // Of -|gate|, which cannot overflow: sigmoid(g) is 1 / (1 + e^-g) or, below 0, e^g / (1 + e^g).
      const f32x8 g = read(gate + i), e = exp2_of((f32x8)((u32x8)g | 0x80000000u) * LOG2E);
      const f32x8 y = (g < 0.f ? g * e : g) / (e + 1.f) * read(up + i);
      codes ? store(room + i, y) : write(out + row * width + i, y);
    }
    if (codes) quantize_row(room, width, codes + row * width, scales + row);
  });
}

template <class T>
void quantize(const T* x, int64_t num_rows, int width, int8_t* codes, float* scales, int threads) {
  by_row(num_rows, width, threads, [=](int64_t row, float* room) {
    for (int i = 0; i < width; i += 8) store(room + i, read(x + row * width + i));
    quantize_row(room, width, codes + row * width, scales + row);
  });
}

// One stage inside eight numbers: partners are STEP apart.
template <int STEP>
f32x8 butterfly(f32x8 x) {
  f32x8 partner, sign;
  for (int i = 0; i < 8; i++) partner[i] = x[i ^ STEP], sign[i] = i & STEP ? -1.f : 1.f;
  return partner + x * sign;
}

// x times the normalised Hadamard matrix of its size, a power of two and at least 8.
void hadamard(float* x, int dim) {
  for (int step = dim / 2; step >= 8; step /= 2)
    for (int start = 0; start < dim; start += 2 * step)
      for (int i = start; i < start + step; i += 8) {
        const f32x8 a = load(x + i), b = load(x + i + step);
        store(x + i, a + b);
        store(x + i + step, a - b);
      }
  const f32x8 factor = splat(1.f / sqrtf(dim));
  for (int i = 0; i < dim; i += 8) store(x + i, butterfly<1>(butterfly<2>(butterfly<4>(load(x + i)))) * factor);
}

// Query and key heads in place: norm where there are weights, rotary embedding, Hadamard matrix where `turned` has a 1
// for the head's KV head.
template <class T>
void rotate(T* x, int64_t stride, int64_t num_rows, int num_q, int num_k, int dim, const float* cos,
            const float* sin, const T* q_norm, const T* k_norm, float eps, const uint8_t* turned, int threads) {
  by_row(num_rows, dim, threads, [=](int64_t row, float* room) {
    const int half = dim / 2, group = num_q / num_k;
    const float *c = cos + row * half, *s = sin + row * half;
    for (int head = 0; head < num_q + num_k; head++) {
      T* at = x + row * stride + head * dim;
      const T* weight = head < num_q ? q_norm : k_norm;
      const f32x8 factor = splat(weight ? inverse_norm(at, dim, eps) : 1.f);
      for (int i = 0; i < half; i += 8) {
        f32x8 a = read(at + i), b = read(at + half + i);
        if (weight) a = a * factor * read(weight + i), b = b * factor * read(weight + half + i);
        store(room + i, a * load(c + i) - b * load(s + i));
        store(room + half + i, b * load(c + i) + a * load(s + i));
      }
      if (turned && turned[head < num_q ? head / group : head - num_q]) hadamard(room, dim);
      for (int i = 0; i < dim; i += 8) write(at + i, load(room + i));
    }
  });
}

}  // namespace

#define FOR_BOTH(CALL) \
  if (is_bf16) {       \
    typedef bf16 T;    \
    CALL;              \
  } else {             \
    typedef float T;   \
    CALL;              \
  }

extern "C" {

void kvb_rms_norm(int is_bf16, const void* x, const void* weight, int64_t num_rows, int width, float eps, void* out,
                  int8_t* codes, float* scales, int threads) {
  FOR_BOTH(rms_norm((const T*)x, (const T*)weight, num_rows, width, eps, (T*)out, codes, scales, threads))
}

void kvb_silu_mul(int is_bf16, const void* gate_up, int64_t num_rows, int width, void* out, int8_t* codes,
                  float* scales, int threads) {
  FOR_BOTH(silu_mul((const T*)gate_up, num_rows, width, (T*)out, codes, scales, threads))
}

void kvb_quantize_rows(int is_bf16, const void* x, int64_t num_rows, int width, int8_t* codes, float* scales,
                       int threads) {
  FOR_BOTH(quantize((const T*)x, num_rows, width, codes, scales, threads))
}

void kvb_rotate(int is_bf16, void* x, int64_t stride, int64_t num_rows, int num_q, int num_k, int dim,
                const float* cos, const float* sin, const void* q_norm, const void* k_norm, float eps,
                const uint8_t* turned, int threads) {
  FOR_BOTH(rotate((T*)x, stride, num_rows, num_q, num_k, dim, cos, sin, (const T*)q_norm, (const T*)k_norm, eps,
                  turned, threads))
}

}
