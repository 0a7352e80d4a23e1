// Real bytes behind device and pinned memory, poisoned when freed and kept for a while after.
#pragma once
#include <c10/core/Storage.h>
#include <cstddef>
#include <memory>

namespace vacc {

// NaN in every floating point type: memory that nobody wrote, or that was freed.
constexpr int kPoison = 0xFF;

class Backing {
 public:
  static std::shared_ptr<Backing> allocate(size_t nbytes);
  // Takes over what a CPU kernel allocated.
  static std::shared_ptr<Backing> adopt(const c10::Storage& storage);

  Backing(void* data, size_t nbytes, c10::Storage adopted);
  ~Backing();
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  void* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

 private:
  void* data_;
  size_t nbytes_;
  c10::Storage adopted_;
};

}  // namespace vacc
