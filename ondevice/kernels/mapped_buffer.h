// Anonymous memory mapped from the operating system, which gets it back as soon as it is freed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ondevice {

// Least size of a buffer whose pages are huge and all allocated at once.
constexpr size_t kPopulatedBytes = size_t{4} << 20;

class MappedBuffer {
 public:
  MappedBuffer() = default;
  // Zeroed, 4096-aligned (2 MiB-aligned and huge-page advised from kPopulatedBytes up). populated: whether
  // all pages of a smaller one are allocated at once too. Throws std::bad_alloc.
  explicit MappedBuffer(size_t bytes, bool populated = false);
  ~MappedBuffer();
  MappedBuffer(MappedBuffer&& other) noexcept;
  MappedBuffer& operator=(MappedBuffer&& other) noexcept;
  MappedBuffer(const MappedBuffer&) = delete;
  MappedBuffer& operator=(const MappedBuffer&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

  // At least `bytes`, contents lost when it grows.
  void grow(size_t bytes) {
    if (bytes <= size_) return;
    *this = MappedBuffer();  // Freed first: the memory plan counts one buffer, not two.
    *this = MappedBuffer(bytes);
  }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0, mapped_ = 0;
};

}  // namespace ondevice
