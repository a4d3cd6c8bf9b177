// Slots of a page in the order of the products: keys as rows of elements along the head dim, values as rows of elements
// along the slots, [ceil(n / STEP)][dim]. Pages that already have this order are read in place.
#pragma once
#include "buffer.h"
#include "products.h"
#include "unpack.h"

template <class Kind>
class Slots;

template <>
class Slots<Floats> {
 public:
  const float *keys = nullptr, *values = nullptr;

  void read(const Page& page, int dim, int first, int last) {
    const Format& f = *page.format;
    if (f.key_bits == 16 && f.whole_bytes == 4) {
      keys = (const float*)page.keys + (int64_t)first * dim;
      values = (const float*)page.values + (int64_t)first * dim;
      return;
    }
    const size_t size = (last - first) * dim;
    keys_.resize(size), values_.resize(size);
    float *k = keys_.data(), *v = values_.data();
    unpack_.keys(page, dim, first, last, [&](int t, int d, f32x8 x) { store(k + (t - first) * dim + d, x); });
    unpack_.values(page, dim, first, last, [&](int t, int d, f32x8 x) { store(v + (t - first) * dim + d, x); });
    keys = k, values = v;
  }

 private:
  Unpack unpack_;
  Buffer<float> keys_, values_;
};

#ifdef KVBATCH_HAS_PAIRS
template <>
class Slots<Pairs> {
 public:
  const uint32_t *keys = nullptr, *values = nullptr;

  void read(const Page& page, int dim, int first, int last) {
    const Format& f = *page.format;
    const uint16_t *k, *v;
    if (f.key_bits == 16 && f.whole_bytes == 2) {
      k = (const uint16_t*)page.keys + (int64_t)first * dim;
      v = (const uint16_t*)page.values + (int64_t)first * dim;
    } else {
      const size_t size = (last - first) * dim;
      keys_.resize(size), values_.resize(size);
      uint16_t *to_k = keys_.data(), *to_v = values_.data();
      unpack_.keys(page, dim, first, last,
                   [&](int t, int d, f32x8 x) { store_bf16(to_k + (t - first) * dim + d, x); });
      unpack_.values(page, dim, first, last,
                     [&](int t, int d, f32x8 x) { store_bf16(to_v + (t - first) * dim + d, x); });
      k = to_k, v = to_v;
    }
    keys = (const uint32_t*)k;
    values = pair_up(v, last - first, dim);
  }

 private:
  // Number d of each two rows that follow each other side by side; a last row without partner gets zeros.
  const uint32_t* pair_up(const uint16_t* rows, int count, int dim) {
    pairs_.resize((count + 1) / 2 * dim);
    uint32_t* to = pairs_.data();
    for (int t = 0; t < count; t += 2, rows += 2 * dim, to += dim)
      for (int d = 0; d < dim; d += 8) {
        const u32x8 second = t + 1 < count ? widen(rows + dim + d) << 16 : u32x8{};
        const u32x8 pair = widen(rows + d) | second;
        memcpy(to + d, &pair, sizeof pair);
      }
    return pairs_.data();
  }

  Unpack unpack_;
  Buffer<uint16_t> keys_, values_;
  Buffer<uint32_t> pairs_;
};
#endif
