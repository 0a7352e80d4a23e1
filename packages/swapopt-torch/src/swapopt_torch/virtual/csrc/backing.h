// What is behind device and pinned memory: real bytes, poisoned when freed and kept for a while
// after; on a dry machine, addresses alone.
#pragma once
#include <c10/core/Storage.h>
#include <cstddef>
#include <memory>
#include "address_space.h"

namespace vacc {

// NaN in every floating point type: memory that nobody wrote, or that was freed.
constexpr int kPoison = 0xFF;

class Backing {
 public:
  static std::shared_ptr<Backing> allocate(size_t nbytes, Use use);
  // Takes over what a CPU kernel allocated.
  static std::shared_ptr<Backing> adopt(const c10::Storage& storage);

  Backing(void* data, size_t nbytes, c10::Storage adopted);
  Backing(std::unique_ptr<AddressSpace> addresses, size_t nbytes);
  ~Backing();
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  void* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

 private:
  void* data_;
  size_t nbytes_;
  c10::Storage adopted_;
  std::unique_ptr<AddressSpace> addresses_;
};

}  // namespace vacc
