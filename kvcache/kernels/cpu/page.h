// A page as the kernels see it.
#pragma once
#include <cstdint>

// Byte offsets of a page's sections; kvcache/sizes/page_format.py computes them. -1: no such section.
struct Format {
  int32_t key_bits, value_bits, page_tokens, whole_bytes;
  int32_t key_codes, key_scales, key_minima, value_codes, value_scales, value_minima;
};

struct Page {
  const uint8_t *keys, *values;  // codes
  const uint8_t* base;           // origin of the format's other offsets
  const Format* format;
  int count;  // valid slots; the others change no result
};

static inline int round_up(int n) { return (n + 7) / 8 * 8; }

constexpr int64_t PAGE_UNIT = 512;  // bytes, the unit of addresses

// Pages of any format, by address.
struct MixedPages {
  const uint8_t* slab;
  const Format* formats;
  const int64_t* addresses;
  const uint8_t* format_ids;
  const int32_t* counts;
  const int64_t *first, *length;  // [items] the item's pages in the arrays above

  int64_t num_pages(int64_t item) const { return length[item]; }
  int count(int64_t item, int64_t i) const { return counts[first[item] + i]; }
  Page page(int64_t item, int64_t i) const {
    const int64_t n = first[item] + i;
    const Format* f = formats + format_ids[n];
    const uint8_t* base = slab + addresses[n] * PAGE_UNIT;
    return {base + f->key_codes, base + f->value_codes, base, f, counts[n]};
  }
};
