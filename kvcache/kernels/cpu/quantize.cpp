// Full pages of keys and values to packed bytes, a page at a time. Flat C functions for ctypes; checks are in ops.py.
#include "quantize.h"

#include "parallel.h"

namespace {

struct Work {
  const Format& format;
  int dim;
  Source keys, values;
  const int64_t* index;                      // [P, T] rows of the sources
  const float *key_weights, *value_weights;  // [lanes, D, D] or null
  const int64_t* lanes;                      // [P]
  uint8_t* pages;
  int64_t used_bytes, page_bytes;

  Quantize state() const { return Quantize(dim, format.page_tokens); }

  const float* weights(const float* table, int64_t page) const {
    return table ? table + lanes[page] * dim * dim : nullptr;
  }

  void operator()(Quantize& quantize, int64_t i) const {
    const Format& f = format;
    const int64_t* rows = index + i * f.page_tokens;
    uint8_t* page = pages + i * page_bytes;
    quantize.run(keys, rows, weights(key_weights, i), f.key_bits, true, page + f.key_codes, page + f.key_scales,
                 page + f.key_minima);
    quantize.run(values, rows, weights(value_weights, i), f.value_bits, false, page + f.value_codes,
                 page + f.value_scales, page + f.value_minima);
    memset(page + used_bytes, 0, page_bytes - used_bytes);
  }
};

}  // namespace

extern "C" void kvb_quantize(const Format* format, int dim, int64_t num_pages, const int64_t* index,
                             const void* chunk_keys, const void* chunk_values, int chunk_bytes, int64_t lane_tokens,
                             int64_t lane_stride, const void* held_keys, const void* held_values, int held_bytes,
                             const float* key_weights, const float* value_weights, const int64_t* lanes,
                             uint8_t* pages, int64_t used_bytes, int64_t page_bytes, int threads) {
  const auto source = [&](const void* chunk, const void* held) -> Source {
    return {chunk, held, chunk_bytes, held_bytes, lane_tokens, lane_stride, dim};
  };
  Work work = {*format, dim, source(chunk_keys, held_keys), source(chunk_values, held_values), index, key_weights,
               value_weights, lanes, pages, used_bytes, page_bytes};
  parallel(num_pages, threads, work);
}
