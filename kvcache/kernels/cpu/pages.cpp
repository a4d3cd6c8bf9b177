// Decode attention over pages, and pages back to floats. Flat C functions for ctypes; tensors are checked in ops.py.
//
// Work is cut into units of about UNIT_SLOTS slots of one (sequence, KV head), whatever the number of threads, and
// partial results are joined in order: the result does not depend on the threads.
#include <atomic>
#include <cmath>

#include "attend.h"

namespace {

constexpr int64_t PAGE_UNIT = 512;  // addresses count in units of so many bytes
constexpr int64_t UNIT_SLOTS = 2048;

struct Unit {
  int64_t item, first, last;  // pages [first, last) of the item
  int64_t slot;               // slots of the item before them
};

template <class Work>
void parallel(int64_t count, int threads, Work& work) {
  std::atomic<int64_t> next(0);
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1)
  {
    auto state = work.state();
    for (int64_t i = next++; i < count; i = next++) work(state, i);
  }
}

// Pages of items, however they are addressed: num_pages(item), count(item, i) and page(item, i).
template <class Pages>
struct Decode {
  const Pages& pages;
  int64_t items;
  int heads, dim, page_tokens;
  float scale;
  const float* q;  // [items, G, D]
  float* out;      // [items, G, D]
  float* lse;      // [items, G]
  float* largest;  // [slots] or null

  std::vector<Unit> units;
  std::vector<int64_t> first_unit, first_slot;  // [items + 1]
  std::vector<float> partial;                   // [units, G, D + 2]

  void plan() {
    int64_t slots = 0;
    for (int64_t item = 0; item < items; item++) {
      first_unit.push_back(units.size());
      first_slot.push_back(slots);
      const int64_t start = slots, num_pages = pages.num_pages(item);
      Unit unit = {item, 0, 0, 0};
      for (int64_t i = 0; i < num_pages; i++) {
        slots += pages.count(item, i);
        unit.last = i + 1;
        if (slots - start - unit.slot < UNIT_SLOTS && i + 1 < num_pages) continue;
        units.push_back(unit);
        unit = {item, i + 1, i + 1, slots - start};
      }
    }
    first_unit.push_back(units.size());
    first_slot.push_back(slots);
    partial.resize(units.size() * heads * (dim + 2));
  }

  float* partial_out(int64_t unit) { return &partial[unit * heads * (dim + 2)]; }

  struct State {
    Attention attention;
    std::vector<float> scores;
  };
  State state() const { return {Attention(heads, dim, page_tokens), {}}; }

  // Without `largest` the index is a unit's, with it an item's, as a slot's weight is known only at the item's end.
  void operator()(State& state, int64_t index) {
    if (!largest) return run(state, units[index], partial_out(index), nullptr, 0);
    const int64_t stride = (first_slot[index + 1] - first_slot[index] + 7) / 8 * 8;
    state.scores.resize(stride * heads);
    for (int64_t u = first_unit[index]; u < first_unit[index + 1]; u++)
      run(state, units[u], partial_out(u), &state.scores[units[u].slot], stride);
    join(index);
    const int64_t end = first_slot[index + 1];
    for (int64_t slot = first_slot[index]; slot < end; slot += 8) {
      f32x8 best = splat(-1e30f);
      for (int g = 0; g < heads; g++)
        best = larger(best, load(&state.scores[g * stride + slot - first_slot[index]]) - lse[index * heads + g] * LOG2E);
      best = exp2_of(best);
      memcpy(largest + slot, &best, 4 * std::min<int64_t>(8, end - slot));
    }
  }

  void run(State& state, const Unit& unit, float* result, float* kept, int64_t kept_stride) {
    float* max = result + heads * dim;
    state.attention.start(q + unit.item * heads * dim, scale, result, max, max + heads);
    for (int64_t i = unit.first; i < unit.last; i++) {
      const int count = pages.count(unit.item, i);
      if (!count) continue;
      const bool more = i + 1 < unit.last && pages.count(unit.item, i + 1);
      const Page page = pages.page(unit.item, i), next = more ? pages.page(unit.item, i + 1) : page;
      state.attention.add(page, more ? &next : nullptr, kept, kept_stride);
      if (kept) kept += count;
    }
    state.attention.finish();
  }

  // out and lse of an item from its units. An item without slots gives zeros and -inf.
  void join(int64_t item) {
    for (int g = 0; g < heads; g++) {
      float max = -1e30f, sum = 0;
      for (int64_t u = first_unit[item]; u < first_unit[item + 1]; u++)
        max = std::max(max, partial_out(u)[heads * dim + g]);
      float* o = out + (item * heads + g) * dim;
      std::fill(o, o + dim, 0.f);
      for (int64_t u = first_unit[item]; u < first_unit[item + 1]; u++) {
        const float* p = partial_out(u);
        const float weight = exp2_of(p[heads * dim + g] - max);
        sum += weight * p[heads * (dim + 1) + g];
        for (int d = 0; d < dim; d++) o[d] += weight * p[g * dim + d];
      }
      for (int d = 0; d < dim && sum > 0; d++) o[d] /= sum;
      lse[item * heads + g] = sum > 0 ? (max + std::log2(sum)) * LN2 : -HUGE_VALF;
    }
  }

  void execute(int threads) {
    plan();
    parallel(largest ? items : (int64_t)units.size(), threads, *this);
    for (int64_t item = 0; item < items && !largest; item++) join(item);
  }
};

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

// Pages of full precision, keys and values in slabs of their own, by page id.
struct PoolPages {
  const uint8_t *keys, *values;
  const int64_t* const* tables;  // [items] page ids
  const int64_t* lengths;        // [items] tokens
  int64_t page_bytes;            // of keys, or of values
  Format format;

  int64_t num_pages(int64_t item) const { return (lengths[item] + format.page_tokens - 1) / format.page_tokens; }
  int count(int64_t item, int64_t i) const {
    return std::min<int64_t>(format.page_tokens, lengths[item] - i * format.page_tokens);
  }
  Page page(int64_t item, int64_t i) const {
    const int64_t offset = tables[item][i] * page_bytes;
    return {keys + offset, values + offset, nullptr, &format, count(item, i)};
  }
};

// Every page's rows as floats, the items' one behind the other.
struct Dequantise {
  const MixedPages& pages;
  int64_t items;
  int dim;
  bool bf16;
  void *keys, *values;  // [slots, D]

  struct Task {
    int64_t item, page, row;
  };
  std::vector<Task> tasks;

  void execute(int threads) {
    int64_t row = 0;
    for (int64_t item = 0; item < items; item++)
      for (int64_t i = 0; i < pages.num_pages(item); i++) {
        if (pages.count(item, i)) tasks.push_back({item, i, row});
        row += pages.count(item, i);
      }
    parallel(tasks.size(), threads, *this);
  }

  struct Room {
    std::vector<float> ones, zeros, a, b, c;
  };
  Room state() const { return {}; }

  void operator()(Room& room, int64_t task) const {
    const int64_t row = tasks[task].row;
    const Page page = pages.page(tasks[task].item, tasks[task].page);
    const Format& f = *page.format;
    const int size = round_up(std::max(dim, page.count));
    room.ones.assign(size, 1.f);
    room.zeros.assign(size, 0.f);
    const float *ones = room.ones.data(), *zeros = room.zeros.data();
    auto section = [&](int offset, int count, std::vector<float>& into, const float* otherwise) {
      if (offset < 0) return otherwise;
      into.resize(size);
      read_halves(page.base + offset, count, into.data());
      return (const float*)into.data();
    };
    write(f.key_bits, page.keys, page, section(f.key_scales, dim, room.a, ones),
          section(f.key_minima, dim, room.b, zeros), section(f.key_factors, page.count, room.c, ones), zeros, keys,
          row);
    write(f.value_bits, page.values, page, ones, zeros, section(f.value_scales, page.count, room.a, ones),
          section(f.value_minima, page.count, room.b, zeros), values, row);
  }

  // (code * scale[d] + minimum[d]) * factor[t] + offset[t]
  void write(int bits, const uint8_t* codes, const Page& page, const float* scale, const float* minimum,
             const float* factor, const float* offset, void* out, int64_t row) const {
    with_codes(bits, page.format->whole_bytes, [&](auto kind) {
      using Codes = decltype(kind);
      for (int t = 0; t < page.count; t++) {
        for (int u = 0; u < dim / 16; u++) {
          f32x8 x[2];
          Codes::read(codes + (int64_t)t * Codes::row_bytes(dim), dim, u, x[0], x[1]);
          for (int half = 0; half < 2; half++) {
            const int d = 16 * u + 8 * half;
            x[half] = (x[half] * load(scale + d) + load(minimum + d)) * factor[t] + offset[t];
            if (bf16)
              store_bf16((uint16_t*)out + (row + t) * dim + d, x[half]);
            else
              store((float*)out + (row + t) * dim + d, x[half]);
          }
        }
      }
    });
  }
};

}  // namespace

extern "C" {

// Shapes are those of the structs above.
void kvb_decode_mixed(const uint8_t* slab, const Format* formats, int num_formats, const int64_t* addresses,
                      const uint8_t* format_ids, const int32_t* counts, const int64_t* first, const int64_t* length,
                      int64_t items, int heads, int dim, float scale, const float* q, float* out, float* lse,
                      float* largest, int threads) {
  int page_tokens = 0;
  for (int i = 0; i < num_formats; i++) page_tokens = std::max(page_tokens, formats[i].page_tokens);
  const MixedPages pages = {slab, formats, addresses, format_ids, counts, first, length};
  Decode<MixedPages> decode{pages, items, heads, dim, page_tokens, scale, q, out, lse, largest, {}, {}, {}, {}};
  decode.execute(threads);
}

void kvb_decode_pool(const void* keys, const void* values, int element_bytes, int page_tokens,
                     const int64_t* const* tables, const int64_t* lengths, int64_t items, int heads, int dim,
                     float scale, const float* q, float* out, float* lse, float* largest, int threads) {
  const Format format = {16, 16, page_tokens, element_bytes, 0, -1, -1, 0, -1, -1, -1};
  const PoolPages pages = {(const uint8_t*)keys, (const uint8_t*)values, tables, lengths,
                           (int64_t)page_tokens * dim * element_bytes, format};
  Decode<PoolPages> decode{pages, items, heads, dim, page_tokens, scale, q, out, lse, largest, {}, {}, {}, {}};
  decode.execute(threads);
}

void kvb_dequantise(const uint8_t* slab, const Format* formats, const int64_t* addresses, const uint8_t* format_ids,
                    const int32_t* counts, const int64_t* first, const int64_t* length, int64_t items, int dim,
                    int bf16, void* keys, void* values, int threads) {
  const MixedPages pages = {slab, formats, addresses, format_ids, counts, first, length};
  Dequantise{pages, items, dim, bf16 != 0, keys, values, {}}.execute(threads);
}
}
