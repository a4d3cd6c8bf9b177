// What a layer does before and after attention, a call each: a decode step has so few tokens that the kernels' own
// calls from Python would take longer than their work. Structs are those of compiled_passes.py.
#include "kernels.h"

namespace {

enum Kind { FLOATS, BFLOATS, INT8 };  // of a matrix's weights

struct Matrix {
  const void* panels;
  const float* scales;    // with int8 alone
  const int32_t* starts;  // with int8 alone
  const float* bias;      // or null
  int kind, depth, width;
};

struct Layer {
  const void *attention_norm, *q_norm, *k_norm, *mlp_norm;
  const uint8_t* turned;  // of each KV head, whether its queries and keys are; or null
  Matrix qkv, output, gate_up, down;
};

struct Model {
  int is_bf16, hidden, num_q, num_k, head_dim;
  float eps;
};

// For as many tokens as a step has. What a matrix takes comes as numbers or, where its weights are int8, as codes.
struct Room {
  void *normed, *qkv, *gate_up, *product;
  int8_t* codes;
  float* scales;
};

struct Step {
  const Model& model;
  const Room& room;
  int64_t rows;
  int threads;

  // Rows of `x`, or of the codes in the room.
  void multiply(const Matrix& m, const void* x, void* out, bool adds) const {
    if (m.kind == INT8)
      return kvb_int8_product(model.is_bf16, room.codes, room.scales, (const int8_t*)m.panels, m.scales, m.starts, m.bias,
                              rows, m.depth, m.width, out, adds, threads);
    const int types = model.is_bf16 ? 7 : m.kind == BFLOATS ? 2 : 0;
    kvb_float_product(types, x, m.panels, m.bias, rows, m.depth, m.width, out, adds, threads);
  }

  int8_t* codes_for(const Matrix& m) const { return m.kind == INT8 ? room.codes : nullptr; }

  void norm(const void* x, const void* weight, const Matrix& next) const {
    kvb_rms_norm(model.is_bf16, x, weight, rows, model.hidden, model.eps, room.normed, codes_for(next), room.scales,
                 threads);
  }

  void before(const Layer& layer, const void* hidden, const float* cos, const float* sin) const {
    norm(hidden, layer.attention_norm, layer.qkv);
    multiply(layer.qkv, room.normed, room.qkv, false);
    kvb_rotate(model.is_bf16, room.qkv, layer.qkv.width, rows, model.num_q, model.num_k, model.head_dim, cos, sin,
               layer.q_norm, layer.k_norm, model.eps, layer.turned, threads);
  }

  void after(const Layer& layer, void* hidden, const void* attended) const {
    if (layer.output.kind == INT8)
      kvb_quantize_rows(model.is_bf16, attended, rows, layer.output.depth, room.codes, room.scales, threads);
    multiply(layer.output, attended, hidden, true);
    norm(hidden, layer.mlp_norm, layer.gate_up);
    multiply(layer.gate_up, room.normed, room.gate_up, false);
    kvb_silu_mul(model.is_bf16, room.gate_up, rows, layer.down.depth, room.product, codes_for(layer.down), room.scales,
                 threads);
    multiply(layer.down, room.product, hidden, true);
  }
};

}  // namespace

extern "C" {

void kvb_before_attention(const Model* model, const Layer* layer, const Room* room, int64_t rows, const void* hidden,
                          const float* cos, const float* sin, int threads) {
  Step{*model, *room, rows, threads}.before(*layer, hidden, cos, sin);
}

void kvb_after_attention(const Model* model, const Layer* layer, const Room* room, int64_t rows, void* hidden,
                         const void* attended, int threads) {
  Step{*model, *room, rows, threads}.after(*layer, hidden, attended);
}

}
