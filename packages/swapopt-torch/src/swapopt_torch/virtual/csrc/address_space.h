// Addresses of a dry machine: unique while they last, without memory behind them.
#pragma once
#include <cstddef>

namespace vacc {

// What a dry block is for: nobody may touch device memory; a program may use pinned host memory,
// which is zeros and takes pages only as they are written.
enum class Use { kDevice, kHost };

class AddressSpace {
 public:
  AddressSpace(size_t nbytes, Use use);  // throws if the process has no addresses left
  ~AddressSpace();
  AddressSpace(const AddressSpace&) = delete;
  AddressSpace& operator=(const AddressSpace&) = delete;

  void* data() const { return data_; }

 private:
  void* data_;
  size_t nbytes_;
};

}  // namespace vacc
