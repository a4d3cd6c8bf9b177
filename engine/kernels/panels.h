// How a product of rows with weights in panels of outputs is shared out. No result depends on it.
#pragma once
#include <algorithm>
#include <cstdint>

#include "parallel.h"

constexpr int TILE_ROWS = 6;  // rows whose sums, with a panel's outputs, stay in registers
constexpr int TASK_ROWS = 16 * TILE_ROWS;
constexpr int TASK_BYTES = 144 << 10;  // of panels: beside TASK_ROWS rows they stay in the second-level cache
constexpr int TASKS = 4;               // a thread's at least, where there are so many panels: so threads end together

// Some rows by some panels.
struct Task {
  int64_t first, end;
  int panel, last;
};

// Calls work(state, task) for all tasks; those that follow each other share their panels.
template <class Work>
class Sharing {
 public:
  Sharing(const Work& work, int64_t num_rows, int num_panels, int64_t panel_bytes, int threads)
      : work_(work), num_rows_(num_rows), num_panels_(num_panels), num_blocks_((num_rows + TASK_ROWS - 1) / TASK_ROWS) {
    const int64_t fair = num_panels * num_blocks_ / (TASKS * threads);
    size_ = (int)std::max<int64_t>(1, std::min(TASK_BYTES / panel_bytes, fair));
    parallel(num_blocks_ * ((num_panels + size_ - 1) / size_), threads, *this);
  }

  auto state() const { return work_.state(); }

  template <class State>
  void operator()(State& state, int64_t i) const {
    const int64_t first = i % num_blocks_ * TASK_ROWS, panel = i / num_blocks_ * size_;
    work_(state, Task{first, std::min(num_rows_, first + TASK_ROWS), (int)panel,
                      (int)std::min<int64_t>(num_panels_, panel + size_)});
  }

 private:
  const Work& work_;
  const int64_t num_rows_, num_panels_, num_blocks_;
  int size_;
};

template <int ROWS>
struct Rows {
  static constexpr int value = ROWS;
};

// Calls use(Rows<n>, row) for rows [row, end), n of them at a time: TILE_ROWS, and once the rest.
template <int ROWS = TILE_ROWS, class Use>
void by_tile(int64_t row, int64_t end, Use use) {
  for (; row + ROWS <= end; row += ROWS) use(Rows<ROWS>{}, row);
  if constexpr (ROWS > 1) by_tile<ROWS - 1>(row, end, use);
}
