// What is worked on together, and what is known of it: tiles, and the states of their rows after some of the keys.
#pragma once

#include "cpu/attention/softmax.h"

namespace tw::TW_ISA {
namespace {

constexpr std::int64_t kSplit = 512;  // keys

struct Tile {
  std::int64_t sequence, query, queries;
  std::int64_t head, heads;    // key heads
  std::int64_t rows;           // of each
  std::int64_t begin, end;     // the keys that some row sees
  std::int64_t first_item, items;
  std::int64_t run;            // splits an item
  char* partials;              // one Partial a split and head where there are several items, else null
  std::int64_t unfinished;     // items that have not arrived

  std::int64_t first_split() const { return begin / kSplit; }
  std::int64_t splits() const { return end > begin ? (end - 1) / kSplit - first_split() + 1 : 0; }
};

// What is known of rows after some of the keys: reference, sum and weighted sum of values of each.
struct Partial {
  float* m;
  float* sum;
  float* o;

  static std::size_t bytes(std::int64_t rows, std::int64_t stride) {
    return sizeof(float) * ((rows * (2 + stride) + 15) / 16 * 16);
  }
  Partial(char* at, std::int64_t rows, std::int64_t stride)
      : m(reinterpret_cast<float*>(at) + rows * stride), sum(m + rows), o(reinterpret_cast<float*>(at)) {}

  void clear(std::int64_t rows, std::int64_t stride) const {
    for (std::int64_t i = 0; i < rows * stride; i += kLanes) store(o + i, f32x16{}, rows * stride - i);
    for (std::int64_t r = 0; r < rows; ++r) {
      m[r] = -__builtin_inff();
      sum[r] = 0.0f;
    }
  }

  // Takes in the keys after these.
  void fold(const Partial& next, std::int64_t rows, std::int64_t stride) const {
    for (std::int64_t r = 0; r < rows; ++r) {
      const float together = next.m[r] > m[r] ? next.m[r] : m[r];
      const float here = m[r] == together ? 1.0f : power_of_two(m[r] - together);
      const float there = next.m[r] == together ? 1.0f : power_of_two(next.m[r] - together);
      m[r] = together;
      sum[r] = sum[r] * here + next.sum[r] * there;
      for (std::int64_t d = 0; d < stride; d += kLanes) {
        float* mine = o + r * stride + d;
        store(mine, load(mine) * here + load(next.o + r * stride + d) * there);
      }
    }
  }
};

// Hands out pieces of a thread's scratch memory.
class Arena {
 public:
  explicit Arena(char* at) : at_(at), start_(at) {}
  template <class T>
  T* take(std::size_t count) {
    T* taken = reinterpret_cast<T*>(at_);
    at_ += (count * sizeof(T) + 63) / 64 * 64;
    return taken;
  }
  std::size_t used() const { return static_cast<std::size_t>(at_ - start_); }

 private:
  char *at_, *start_;
};

}  // namespace
}  // namespace tw::TW_ISA
