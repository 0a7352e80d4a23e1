// Operators of a dry device: shapes, dtypes and strides, worked out on meta tensors; no values.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include "operator_info.h"

namespace vacc {

// Replaces the operator's arguments, meta tensors, by its results. Throws where they would depend
// on values, or where torch does not know their shapes.
void compute_shapes(const c10::OperatorHandle& op, const OperatorInfo& info,
                    torch::jit::Stack& stack);

// What a program gets that reads a dry device: zeros, in memory of its own.
at::Tensor zeros_on_cpu(const at::Tensor& like);

}  // namespace vacc
