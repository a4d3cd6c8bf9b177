// Work shared out to threads one piece at a time, in order.
#pragma once
#include <atomic>
#include <cstdint>

// Calls work(state, i) for all i < count; every thread has a state of its own.
template <class Work>
static void parallel(int64_t count, int threads, Work& work) {
  std::atomic<int64_t> next(0);
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1)
  {
    auto state = work.state();
    for (int64_t i = next++; i < count; i = next++) work(state, i);
  }
}
