// The library's functions that others of it call.
#pragma once
#include <cstdint>

extern "C" {
void kvb_rms_norm(int is_bf16, const void* x, const void* weight, int64_t num_rows, int width, float eps, void* out,
                  int8_t* codes, float* scales, int threads);
void kvb_silu_mul(int is_bf16, const void* gate_up, int64_t num_rows, int width, void* out, int8_t* codes,
                  float* scales, int threads);
void kvb_quantize_rows(int is_bf16, const void* x, int64_t num_rows, int width, int8_t* codes, float* scales,
                       int threads);
void kvb_rotate(int is_bf16, void* x, int64_t stride, int64_t num_rows, int num_q, int num_k, int dim,
                const float* cos, const float* sin, const void* q_norm, const void* k_norm, float eps,
                const uint8_t* turned, int threads);
void kvb_float_product(int types, const void* x, const void* panels, const float* bias, int64_t num_rows, int depth,
                       int width, void* out, int adds, int threads);
void kvb_int8_product(int is_bf16, const int8_t* codes, const float* scales, const int8_t* panels,
                      const float* weight_scales, const int32_t* starts, const float* bias, int64_t num_rows,
                      int depth, int width, void* out, int adds, int threads);
}
