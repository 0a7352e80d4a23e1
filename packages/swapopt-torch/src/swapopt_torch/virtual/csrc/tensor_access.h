// From tensors to the bytes that clock, detector and late mode reason about.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <vector>
#include "core/vector_clock.h"

namespace vacc {

struct ByteRange {
  uintptr_t begin = 0;
  size_t nbytes = 0;

  uintptr_t end() const { return begin + nbytes; }
  bool overlaps(const ByteRange& other) const { return begin < other.end() && other.begin < end(); }
};

// From the first to the last byte that the tensor can reach.
ByteRange byte_range(const at::Tensor& tensor);

// The same without the gaps of a strided tensor, as long as that takes few ranges.
std::vector<ByteRange> byte_runs(const at::Tensor& tensor);

void note_access(const at::Tensor& tensor, ActorId actor, bool write, const char* operation);

// RuntimeError if resize_(0) took the memory that `tensor`, which reaches `range`, needs.
void check_not_released(const at::Tensor& tensor, const ByteRange& range, const char* operation);

}  // namespace vacc
