// Prefill attention: one chunk of one sequence and layer. Flat C functions for ctypes; tensors are checked in ops.py.
#include "prefill.h"

#include "parallel.h"

namespace {

constexpr int UNIT_PANELS = 16;  // rows that share the fetching, and the unpacking, of a page

template <class Kind>
struct Work {
  const Queries& queries;
  const std::vector<Lane>& lanes;
  float* largest;  // [KVH, num_scored] or null

  struct Unit {
    int lane, first, count;
  };
  std::vector<Unit> units;
  std::vector<float> found;  // [units, num_scored]

  int64_t num_scored() const { return lanes[0].num_scored; }

  // Long rows first and large units first, so that threads end together; one thread needs no small ones.
  void plan(int threads) {
    int64_t left = (int64_t)queries.panels() * lanes.size();
    for (size_t lane = 0; lane < lanes.size(); lane++)
      for (int end = queries.panels(); end > 0;) {
        const int64_t share = threads == 1 ? left : std::max<int64_t>(left / (2 * threads), 1);
        const int count = std::min<int64_t>({end, share, UNIT_PANELS});
        end -= count, left -= count;
        units.push_back({(int)lane, end, count});
      }
    found.resize(units.size() * num_scored());
  }

  Prefill<Kind> state() const { return {queries}; }

  void operator()(Prefill<Kind>& prefill, int64_t i) {
    const Unit& unit = units[i];
    prefill.run(lanes[unit.lane], unit.lane, unit.first, unit.count, found.data() + i * num_scored());
  }

  void join() {
    std::fill(largest, largest + lanes.size() * num_scored(), HIDDEN);
    for (size_t i = 0; i < units.size(); i++)
      for (int64_t n = 0; n < num_scored(); n++) {
        float& best = largest[units[i].lane * num_scored() + n];
        best = std::max(best, found[i * num_scored() + n]);
      }
    for (size_t n = 0; n < lanes.size() * num_scored(); n++)
      largest[n] = largest[n] == HIDDEN ? 0 : std::exp2(largest[n]);
  }

  void execute(int threads) {
    plan(threads);
    parallel(units.size(), threads, *this);
    if (largest) join();
  }
};

void execute(const Queries& queries, const std::vector<Lane>& lanes, float* largest, int threads) {
#ifdef KVBATCH_HAS_PAIRS
  if (queries.bf16) return Work<Pairs>{queries, lanes, largest, {}, {}}.execute(threads);
#endif
  Work<Floats>{queries, lanes, largest, {}, {}}.execute(threads);
}

Format whole(int element_bytes, int page_tokens) {
  return {16, 16, page_tokens, element_bytes, 0, -1, -1, 0, -1, -1};
}

}  // namespace

extern "C" {

// One table of page ids per KV head; `past` slots of each lane are older than the chunk.
void kvb_prefill_pool(const uint8_t* keys, const uint8_t* values, int element_bytes, int page_tokens,
                      const int64_t* tables, int64_t table_width, const int64_t* past, int kv_heads, const void* q,
                      int q_bf16, int64_t token_stride, int64_t head_stride, int tokens, int group, int dim,
                      float scale, void* out, float* lse, int rounds, int threads) {
  const Format format = whole(element_bytes, page_tokens);
  const int64_t page_bytes = (int64_t)page_tokens * dim * element_bytes;
  std::vector<Lane> lanes(kv_heads);
  for (int h = 0; h < kv_heads; h++) {
    const int64_t length = past[h] + tokens;
    for (int64_t start = 0; start < length; start += page_tokens) {
      const int64_t offset = tables[h * table_width + start / page_tokens] * page_bytes;
      const int count = std::min<int64_t>(page_tokens, length - start);
      lanes[h].add({keys + offset, values + offset, nullptr, &format, count});
    }
  }
  const Queries queries = {q,     q_bf16 != 0, token_stride, head_stride, tokens, kv_heads * group,
                           group, dim,         scale,        out,         lse,    0,      rounds != 0};
  execute(queries, lanes, nullptr, threads);
}

// Pages of any format, whose addresses may be null, then a prefill buffer [KVH, N, D], lanes `lane_bytes` apart.
void kvb_prefill_mixed(const uint8_t* slab, const Format* formats, const int64_t* addresses, const uint8_t* format_ids,
                       const int32_t* counts, const int64_t* first, const int64_t* length, const uint8_t* keys,
                       const uint8_t* values, int element_bytes, int64_t lane_bytes, int buffer_tokens, int kv_heads,
                       const void* q, int q_bf16, int64_t token_stride, int64_t head_stride, int tokens, int group,
                       int dim, float scale, void* out, float* lse, int64_t distance, float* largest, int rounds,
                       int threads) {
  const MixedPages pages = {slab, formats, addresses, format_ids, counts, first, length};
  const Format format = whole(element_bytes, buffer_tokens);
  std::vector<Lane> lanes(kv_heads);
  for (int h = 0; h < kv_heads; h++) {
    for (int64_t i = 0; addresses && i < pages.num_pages(h); i++)
      if (pages.count(h, i)) lanes[h].add(pages.page(h, i));
    lanes[h].add({keys + h * lane_bytes, values + h * lane_bytes, nullptr, &format, buffer_tokens});
    if (largest) lanes[h].num_scored = buffer_tokens;
  }
  const Queries queries = {q,     q_bf16 != 0, token_stride, head_stride, tokens, kv_heads * group,
                           group, dim,         scale,        out,         lse,    distance, rounds != 0};
  execute(queries, lanes, largest, threads);
}
}
