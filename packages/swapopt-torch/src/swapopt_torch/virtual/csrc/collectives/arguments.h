// What a collective may be called with. Every failure is a ValueError, and nothing was sent then.
#pragma once
#include <vector>
#include "staging.h"

namespace vacc {

// Dense strided tensors in memory that was not released, all on the device of that index.
void check_tensors(const char* operation, const Tensors& tensors, int device);
// Lists of lists are of a time when one process had many devices: one list is expected now.
const at::Tensor& only_one(const char* operation, const Tensors& tensors);
const Tensors& only_one(const char* operation, const std::vector<Tensors>& lists);
const at::Tensor& first_of(const char* operation, const Tensors& tensors);
void check_lists(const char* operation, const std::vector<Tensors>& lists, int members);
void check_list(const char* operation, const Tensors& list, int expected);
void check_same_dtype(const char* operation, const at::Tensor& one, const at::Tensor& other);
// `all` holds as many elements as `members` times `one`.
void check_gathered(const char* operation, const at::Tensor& all, const at::Tensor& one,
                    int members);
void check_same_numel(const char* operation, const at::Tensor& one, const at::Tensor& other);
void check_counts(const char* operation, const at::Tensor& tensor,
                  const std::vector<int64_t>& counts, int members);

}  // namespace vacc
