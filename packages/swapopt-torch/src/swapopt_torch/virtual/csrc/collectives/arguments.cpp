#include "arguments.h"
#include <numeric>
#include "../tensor_access.h"
#include "../world.h"

namespace vacc {

void check_tensors(const char* operation, const Tensors& tensors, int device) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.device().type() == kVirtual && tensor.device().index() == device,
                      operation, ": expected all tensors on virtual:", device, ", found one on ",
                      tensor.device(), ". Move it there first.");
    TORCH_CHECK_VALUE(tensor.layout() == c10::kStrided, operation,
                      ": expected dense tensors, found layout ", tensor.layout(),
                      ". Make it dense with to_dense() first.");
    TORCH_CHECK_VALUE(tensor.is_contiguous(tensor.suggest_memory_format()) && !tensor.is_conj() &&
                          !tensor.is_neg(),
                      operation, ": expected contiguous tensors, found one of shape ",
                      tensor.sizes(), " and strides ", tensor.strides(),
                      tensor.is_conj() || tensor.is_neg() ? ", conjugated or negated in a view" : "",
                      ". Pass tensor.contiguous(), and copy the result back.");
    check_not_released(tensor, byte_range(tensor), operation);
  }
}

const at::Tensor& only_one(const char* operation, const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, operation, ": expected one tensor, found ",
                    tensors.size(), ".");
  return tensors.front();
}

const Tensors& only_one(const char* operation, const std::vector<Tensors>& lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, operation, ": expected one list of tensors, found ",
                    lists.size(), ".");
  return lists.front();
}

const at::Tensor& first_of(const char* operation, const Tensors& tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), operation, ": expected at least one tensor, found none.");
  return tensors.front();
}

void check_lists(const char* operation, const std::vector<Tensors>& lists, int members) {
  TORCH_CHECK_VALUE(static_cast<int>(lists.size()) == members, operation,
                    ": expected a list of tensors for each of the ", members,
                    " members of the group, found ", lists.size(), ".");
}

void check_list(const char* operation, const Tensors& list, int expected) {
  TORCH_CHECK_VALUE(static_cast<int>(list.size()) == expected, operation, ": expected a list of ",
                    expected, " tensors, found ", list.size(), ".");
}

void check_same_dtype(const char* operation, const at::Tensor& one, const at::Tensor& other) {
  TORCH_CHECK_VALUE(one.dtype() == other.dtype(), operation,
                    ": expected input and output of one dtype, found ", one.dtype(), " and ",
                    other.dtype(), ".");
}

void check_gathered(const char* operation, const at::Tensor& all, const at::Tensor& one,
                    int members) {
  check_same_dtype(operation, all, one);
  TORCH_CHECK_VALUE(all.numel() == one.numel() * members, operation, ": expected ", members,
                    " times ", one.numel(), " elements, found ", all.numel(), ".");
}

void check_same_numel(const char* operation, const at::Tensor& one, const at::Tensor& other) {
  check_same_dtype(operation, one, other);
  TORCH_CHECK_VALUE(one.numel() == other.numel(), operation, ": expected ", one.numel(),
                    " elements, found ", other.numel(), ".");
}

void check_counts(const char* operation, const at::Tensor& tensor,
                  const std::vector<int64_t>& counts, int members) {
  if (counts.empty()) {
    const int64_t rows = tensor.dim() == 0 ? 0 : tensor.size(0);
    TORCH_CHECK_VALUE(tensor.dim() > 0 && rows % members == 0, operation,
                      ": expected a first dimension that divides by the ", members,
                      " members of the group, found shape ", tensor.sizes(),
                      ". Pass the sizes of the splits.");
    return;
  }
  TORCH_CHECK_VALUE(static_cast<int>(counts.size()) == members, operation, ": expected ", members,
                    " split sizes, found ", counts.size(), ".");
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  TORCH_CHECK_VALUE(tensor.dim() > 0 && tensor.size(0) == total, operation,
                    ": expected split sizes that add up to the first dimension of shape ",
                    tensor.sizes(), ", found a sum of ", total, ".");
}

}  // namespace vacc
