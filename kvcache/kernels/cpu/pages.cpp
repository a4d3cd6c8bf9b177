// Decode attention over pages, and pages back to floats. Flat C functions for ctypes; tensors are checked in ops.py.
//
// Work is cut into units of about UNIT_SLOTS slots of one (sequence, KV head), whatever the number of threads, and
// partial results are joined in order: the result does not depend on the threads.
#include <cmath>

#include "attend.h"
#include "parallel.h"
#include "unpack.h"

namespace {

constexpr int64_t UNIT_SLOTS = 2048;

struct Unit {
  int64_t item, first, last;  // pages [first, last) of the item
  int64_t slot;               // slots of the item before them
};

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
struct Dequantize {
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

  Unpack state() const { return {}; }

  void operator()(Unpack& unpack, int64_t task) const {
    const int64_t row = tasks[task].row;
    const Page page = pages.page(tasks[task].item, tasks[task].page);
    unpack.keys(page, dim, 0, page.count, [&](int t, int d, f32x8 x) { put(keys, (row + t) * dim + d, x); });
    unpack.values(page, dim, 0, page.count, [&](int t, int d, f32x8 x) { put(values, (row + t) * dim + d, x); });
  }

  void put(void* into, int64_t at, f32x8 x) const {
    if (bf16)
      store_bf16((uint16_t*)into + at, x);
    else
      store((float*)into + at, x);
  }
};

}  // namespace

extern "C" {

// Shapes are those of the structs above.
void kvb_decode_mixed(const uint8_t* slab, const Format* formats, const int64_t* addresses, const uint8_t* format_ids,
                      const int32_t* counts, const int64_t* first, const int64_t* length, int num_formats, int64_t items,
                      int heads, int dim, float scale, const float* q, float* out, float* lse, float* largest,
                      int threads) {
  int page_tokens = 0;
  for (int i = 0; i < num_formats; i++) page_tokens = std::max(page_tokens, formats[i].page_tokens);
  const MixedPages pages = {slab, formats, addresses, format_ids, counts, first, length};
  Decode<MixedPages> decode{pages, items, heads, dim, page_tokens, scale, q, out, lse, largest, {}, {}, {}, {}};
  decode.execute(threads);
}

void kvb_decode_pool(const void* keys, const void* values, int element_bytes, int page_tokens,
                     const int64_t* const* tables, const int64_t* lengths, int64_t items, int heads, int dim,
                     float scale, const float* q, float* out, float* lse, float* largest, int threads) {
  const Format format = {16, 16, page_tokens, element_bytes, 0, -1, -1, 0, -1, -1};
  const PoolPages pages = {(const uint8_t*)keys, (const uint8_t*)values, tables, lengths,
                           (int64_t)page_tokens * dim * element_bytes, format};
  Decode<PoolPages> decode{pages, items, heads, dim, page_tokens, scale, q, out, lse, largest, {}, {}, {}, {}};
  decode.execute(threads);
}

void kvb_dequantize(const uint8_t* slab, const Format* formats, const int64_t* addresses, const uint8_t* format_ids,
                    const int32_t* counts, const int64_t* first, const int64_t* length, int64_t items, int dim,
                    int bf16, void* keys, void* values, int threads) {
  const MixedPages pages = {slab, formats, addresses, format_ids, counts, first, length};
  Dequantize{pages, items, dim, bf16 != 0, keys, values, {}}.execute(threads);
}
}
