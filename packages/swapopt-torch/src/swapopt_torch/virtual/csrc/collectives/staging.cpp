#include "staging.h"
#include <ATen/ops/empty.h>
#include <cstring>
#include "../tensor_access.h"

namespace vacc {

void Piece::copy_to(void* to) const {
  if (nbytes == 0) return;
  std::memcpy(to, static_cast<const char*>(tensor.const_data_ptr()) + offset, nbytes);
}

void Piece::copy_from(const void* from) const {
  if (nbytes == 0) return;
  check_not_released(tensor, byte_range(tensor), "the result of a collective");
  std::memcpy(static_cast<char*>(tensor.mutable_data_ptr()) + offset, from, nbytes);
}

Pieces whole(const Tensors& tensors) {
  Pieces pieces;
  for (const at::Tensor& tensor : tensors) pieces.push_back({tensor, 0, tensor.nbytes()});
  return pieces;
}

Pieces parts_of(const at::Tensor& tensor, int parts) {
  Pieces pieces;
  const size_t nbytes = tensor.nbytes() / static_cast<size_t>(parts);
  for (int i = 0; i < parts; ++i)
    pieces.push_back({tensor, static_cast<size_t>(i) * nbytes, nbytes});
  return pieces;
}

Pieces rows_of(const at::Tensor& tensor, const std::vector<int64_t>& counts, int parts) {
  if (counts.empty()) return parts_of(tensor, parts);
  Pieces pieces;
  const auto rows = static_cast<size_t>(tensor.size(0));
  const size_t row_nbytes = rows == 0 ? 0 : tensor.nbytes() / rows;
  size_t offset = 0;
  for (const int64_t count : counts) {
    pieces.push_back({tensor, offset, static_cast<size_t>(count) * row_nbytes});
    offset += pieces.back().nbytes;
  }
  return pieces;
}

size_t nbytes_of(const Pieces& pieces) {
  size_t total = 0;
  for (const Piece& piece : pieces) total += piece.nbytes;
  return total;
}

size_t nbytes_of(const Tensors& tensors) { return nbytes_of(whole(tensors)); }

int index_of_device(const at::Tensor& tensor) { return tensor.device().index(); }

at::Tensor empty_bytes(size_t nbytes) {
  return at::empty({static_cast<int64_t>(nbytes)}, at::TensorOptions().dtype(at::kByte));
}

char* address_in(const at::Tensor& bytes, size_t offset) {
  return static_cast<char*>(bytes.mutable_data_ptr()) + offset;
}

void pack(const Pieces& pieces, const at::Tensor& bytes, size_t offset) {
  for (const Piece& piece : pieces) {
    piece.copy_to(address_in(bytes, offset));
    offset += piece.nbytes;
  }
}

void unpack(const at::Tensor& bytes, size_t offset, const Pieces& pieces) {
  for (const Piece& piece : pieces) {
    piece.copy_from(address_in(bytes, offset));
    offset += piece.nbytes;
  }
}

Tensors staged_results_like(const Tensors& tensors) {
  Tensors staged;
  for (const at::Tensor& tensor : tensors)
    staged.push_back(at::empty({tensor.numel()}, at::TensorOptions().dtype(tensor.dtype())));
  return staged;
}

Tensors staged_copies(const Tensors& tensors) {
  Tensors staged = staged_results_like(tensors);
  const Pieces pieces = whole(tensors);
  for (size_t i = 0; i < pieces.size(); ++i) pieces[i].copy_to(staged[i].mutable_data_ptr());
  return staged;
}

void copy_back(const Tensors& staged, const Tensors& tensors) {
  const Pieces pieces = whole(tensors);
  for (size_t i = 0; i < pieces.size(); ++i) pieces[i].copy_from(staged[i].const_data_ptr());
}

}  // namespace vacc
