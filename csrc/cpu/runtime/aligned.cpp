#include "cpu/runtime/aligned.h"

#include <cstdlib>
#include <new>
#include <utility>

namespace tw {

AlignedBuffer::AlignedBuffer(std::size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  const std::size_t whole_lines = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  if (whole_lines < bytes) throw std::bad_alloc();
  data_ = std::aligned_alloc(kCacheLine, whole_lines);
  if (data_ == nullptr) throw std::bad_alloc();
}

AlignedBuffer::AlignedBuffer(AlignedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

AlignedBuffer& AlignedBuffer::operator=(AlignedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

AlignedBuffer::~AlignedBuffer() { std::free(data_); }

void* AlignedBuffer::data() const { return data_; }

std::size_t AlignedBuffer::size() const { return size_; }

void* thread_scratch(Scratch slot, std::size_t bytes) {
  thread_local AlignedBuffer buffers[3];
  AlignedBuffer& buffer = buffers[static_cast<int>(slot)];
  if (buffer.size() < bytes) {
    buffer = AlignedBuffer();  // frees before it allocates
    buffer = AlignedBuffer(bytes);
  }
  return buffer.data();
}

}  // namespace tw
