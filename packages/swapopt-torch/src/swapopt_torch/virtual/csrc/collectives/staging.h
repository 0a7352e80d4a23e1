// Bytes of device tensors on their way through the transport: copied out, and copied in later.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstddef>
#include <vector>

namespace vacc {

using Tensors = std::vector<at::Tensor>;

// A stretch of the bytes of a dense tensor.
struct Piece {
  at::Tensor tensor;
  size_t offset;
  size_t nbytes;

  void copy_to(void* to) const;
  void copy_from(const void* from) const;
};
using Pieces = std::vector<Piece>;

Pieces whole(const Tensors& tensors);
// Equal parts of the tensor, one per member of a group.
Pieces parts_of(const at::Tensor& tensor, int parts);
// Parts by rows of the first dimension; no counts: equal parts.
Pieces rows_of(const at::Tensor& tensor, const std::vector<int64_t>& counts, int parts);
size_t nbytes_of(const Pieces& pieces);
size_t nbytes_of(const Tensors& tensors);
int index_of_device(const at::Tensor& tensor);

at::Tensor empty_bytes(size_t nbytes);
char* address_in(const at::Tensor& bytes, size_t offset);
// The pieces one after the other, from `offset` on.
void pack(const Pieces& pieces, const at::Tensor& bytes, size_t offset);
void unpack(const at::Tensor& bytes, size_t offset, const Pieces& pieces);

// Flat CPU tensors of the same dtypes and values.
Tensors staged_copies(const Tensors& tensors);
Tensors staged_results_like(const Tensors& tensors);
void copy_back(const Tensors& staged, const Tensors& tensors);

}  // namespace vacc
