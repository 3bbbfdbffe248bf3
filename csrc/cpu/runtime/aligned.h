// Memory that starts on a cache line. Nothing here is a template: units of a higher instruction set include it.
#pragma once

#include <cstddef>

namespace tw {

constexpr std::size_t kCacheLine = 64;

// Owns uninitialised bytes; std::bad_alloc where there are none left.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(std::size_t bytes);
  AlignedBuffer(AlignedBuffer&& other) noexcept;
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept;
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  ~AlignedBuffer();

  void* data() const;
  std::size_t size() const;

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

// At least `bytes` uninitialised bytes of the calling thread's own, valid until it asks for this slot again. What a
// kernel needs in every call is so allocated once. Slots keep what is needed at the same time apart.
enum class Scratch : int { operand = 0, panel = 1, partial = 2 };
void* thread_scratch(Scratch slot, std::size_t bytes);

}  // namespace tw
