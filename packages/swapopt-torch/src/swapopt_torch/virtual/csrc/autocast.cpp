// Autocast: the same casts as on the CPU.
#include <ATen/autocast_mode.h>
#include <torch/library.h>
#include <set>
#include <string>
#include <utility>
#include <vector>
#include "operator_info.h"
#include "world.h"

namespace vacc {
namespace {

// The same casts as on the CPU, operator for operator, so that the numbers are the same too.
enum class Policy { kLowerPrecision, kFloat32, kWidest };

template <typename Visit>
void each_tensor(torch::jit::Stack& arguments, size_t count, Visit visit) {
  for (size_t i = arguments.size() - count; i < arguments.size(); ++i) {
    c10::IValue& value = arguments[i];
    if (value.isTensor()) {
      value = visit(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) tensor = visit(tensor);
      value = c10::IValue(std::move(tensors));
    }
  }
}

at::ScalarType widest_type(torch::jit::Stack& arguments, size_t count) {
  auto widest = at::autocast::get_autocast_dtype(kVirtual);
  each_tensor(arguments, count, [&](const at::Tensor& tensor) {
    if (tensor.defined()) widest = at::autocast::promote_type(widest, kVirtual, tensor);
    return tensor;
  });
  return widest;
}

template <Policy policy>
void call_with_casts(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));
  const size_t count = op.schema().arguments().size();
  auto dtype = at::kFloat;
  if constexpr (policy == Policy::kLowerPrecision)
    dtype = at::autocast::get_autocast_dtype(kVirtual);
  if constexpr (policy == Policy::kWidest) dtype = widest_type(*stack, count);
  each_tensor(*stack, count, [dtype](const at::Tensor& tensor) {
    return tensor.defined() ? at::autocast::cached_cast(dtype, tensor, kVirtual) : tensor;
  });
  op.callBoxed(stack);
}

Policy policy_of(const std::string& name) {
  static const std::set<std::string> lower_precision{"_addmm_activation",
                                                     "_convolution.deprecated",
                                                     "_native_multi_head_attention",
                                                     "addbmm",
                                                     "addmm",
                                                     "baddbmm",
                                                     "bmm",
                                                     "conv1d",
                                                     "conv1d.padding",
                                                     "conv2d",
                                                     "conv2d.padding",
                                                     "conv3d",
                                                     "conv3d.padding",
                                                     "conv_tbc",
                                                     "conv_transpose1d",
                                                     "conv_transpose2d.input",
                                                     "conv_transpose3d.input",
                                                     "linalg_vecdot",
                                                     "linear",
                                                     "matmul",
                                                     "mkldnn_rnn_layer",
                                                     "mm",
                                                     "prelu",
                                                     "scaled_dot_product_attention"};
  static const std::set<std::string> widest{"cat", "index_copy", "stack"};
  if (lower_precision.count(name) > 0) return Policy::kLowerPrecision;
  return widest.count(name) > 0 ? Policy::kWidest : Policy::kFloat32;
}

torch::CppFunction kernel_for(Policy policy) {
  switch (policy) {
    case Policy::kLowerPrecision:
      return torch::CppFunction::makeFromBoxedFunction<&call_with_casts<Policy::kLowerPrecision>>();
    case Policy::kWidest:
      return torch::CppFunction::makeFromBoxedFunction<&call_with_casts<Policy::kWidest>>();
    default:
      return torch::CppFunction::makeFromBoxedFunction<&call_with_casts<Policy::kFloat32>>();
  }
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const std::string& name : aten_operators([](const c10::OperatorHandle& op) {
         return op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU);
       })) {
    library.impl(name.c_str(), kernel_for(policy_of(name)));
  }
}

}  // namespace
}  // namespace vacc
