// Autocast, and the choice of an attention kernel.
#include <ATen/autocast_mode.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <torch/library.h>
#include <optional>
#include "cpu_alias.h"
#include "world.h"

namespace vacc {
namespace {

void cast_tensors(c10::IValue& value, at::ScalarType dtype) {
  const auto cast = [dtype](const at::Tensor& tensor) {
    return tensor.defined() ? at::autocast::cached_cast(dtype, tensor, kVirtual) : tensor;
  };
  if (value.isTensor()) {
    value = cast(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> tensors = value.toTensorVector();
    for (at::Tensor& tensor : tensors) tensor = cast(tensor);
    value = c10::IValue(std::move(tensors));
  }
}

void call_cast_to(at::ScalarType dtype, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) cast_tensors((*stack)[i], dtype);
  op.callBoxed(stack);
}

void in_lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call_cast_to(at::autocast::get_autocast_dtype(kVirtual), op, stack);
}

void in_float32(const c10::OperatorHandle& op, torch::jit::Stack* stack) { call_cast_to(at::kFloat, op, stack); }

constexpr const char* kLowerPrecision[] = {
    "_convolution", "conv1d", "conv2d", "conv3d", "convolution", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
    "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "prelu", "scaled_dot_product_attention"};

constexpr const char* kFloat32[] = {
    "exp", "log", "log2", "log10", "log1p", "reciprocal", "rsqrt", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "softplus",
    "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "nll_loss", "nll_loss_nd", "mse_loss",
    "binary_cross_entropy_with_logits", "logsumexp", "softmax.int", "log_softmax.int", "cumsum", "sum", "sum.dim_IntList"};

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const char* name : kLowerPrecision) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_lower_precision>());
  for (const char* name : kFloat32) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_float32>());
}

at::Tensor attention_argument(const at::Tensor& tensor) {
  at::Tensor alias = cpu_alias(tensor);
  alias.set_requires_grad(tensor.requires_grad() && tensor.is_floating_point());
  return alias;
}

// Another choice than the CPU's would be another kernel, and other numbers.
int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool grouped_query) {
  std::optional<at::Tensor> cpu_mask;
  if (mask && mask->defined()) cpu_mask = attention_argument(*mask);
  return at::_fused_sdp_choice(attention_argument(query), attention_argument(key), attention_argument(value), cpu_mask,
                               dropout, causal, scale, grouped_query);
}

}  // namespace
}  // namespace vacc

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &vacc::choose_attention)
}
