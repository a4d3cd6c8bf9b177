// Slots of a page as rows of floats.
#pragma once
#include <vector>

#include "codes.h"
#include "page.h"

// Holds the buffers for a page's scales, so that they are not allocated for every page.
class Unpack {
 public:
  // Calls put(t, d, x) with numbers [d, d + 8) of the keys in slots [first, last).
  template <class Put>
  void keys(const Page& page, int dim, int first, int last, Put put) {
    const Format& f = *page.format;
    start(dim, page.count);
    read(f.key_bits, page.keys, page, dim, first, last, section(page, f.key_scales, dim, a_, ones_),
         section(page, f.key_minima, dim, b_, zeros_), ones_.data(), zeros_.data(), put);
  }

  template <class Put>
  void values(const Page& page, int dim, int first, int last, Put put) {
    const Format& f = *page.format;
    start(dim, page.count);
    read(f.value_bits, page.values, page, dim, first, last, ones_.data(), zeros_.data(),
         section(page, f.value_scales, page.count, a_, ones_), section(page, f.value_minima, page.count, b_, zeros_),
         put);
  }

 private:
  void start(int dim, int count) {
    const size_t size = round_up(dim > count ? dim : count);
    if (ones_.size() >= size) return;
    ones_.assign(size, 1.f);
    zeros_.assign(size, 0.f);
  }

  // Numbers of a section, or `otherwise` where the format has no such section.
  const float* section(const Page& page, int offset, int count, std::vector<float>& room,
                       const std::vector<float>& otherwise) {
    if (offset < 0) return otherwise.data();
    room.resize(round_up(count));
    read_halves(page.base + offset, count, room.data());
    return room.data();
  }

  // (code * scale[d] + minimum[d]) * factor[t] + offset[t]
  template <class Put>
  static void read(int bits, const uint8_t* codes, const Page& page, int dim, int first, int last, const float* scale,
                   const float* minimum, const float* factor, const float* offset, Put put) {
    with_codes(bits, page.format->whole_bytes, [&](auto kind) {
      using Codes = decltype(kind);
      for (int t = first; t < last; t++) {
        const uint8_t* row = codes + (int64_t)t * Codes::row_bytes(dim);
        for (int u = 0; u < dim / 16; u++) {
          f32x8 x[2];
          Codes::read(row, dim, u, x[0], x[1]);
          for (int half = 0; half < 2; half++) {
            const int d = 16 * u + 8 * half;
            put(t, d, (x[half] * load(scale + d) + load(minimum + d)) * factor[t] + offset[t]);
          }
        }
      }
    });
  }

  std::vector<float> ones_, zeros_, a_, b_;
};
