// Room that starts at a cache line.
#pragma once
#include <cstddef>
#include <vector>

template <class T>
class Buffer {
 public:
  void resize(size_t count) { lines_.resize((count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line)); }
  T* data() { return reinterpret_cast<T*>(lines_.data()); }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines_;
};
