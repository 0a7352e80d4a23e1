#include "dry.h"
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <algorithm>
#include <string>

namespace vacc {
namespace {

constexpr auto kMetaKey = c10::DispatchKey::Meta;

// Updates in place: their results are their first argument, or none.
bool gives_back_its_argument(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const std::string& base = op.operator_name().name;
  if (base.back() != '_') return false;
  if (schema.returns().empty()) return true;
  const c10::AliasInfo* result = schema.returns()[0].alias_info();
  return schema.returns().size() == 1 && result != nullptr && result->isWrite() &&
         schema.arguments()[0].alias_info() != nullptr &&
         *schema.arguments()[0].alias_info() == *result;
}

// torch has a kernel for everything on the meta device, which fails where it has none.
bool knows_shapes(const c10::OperatorHandle& op) {
  using Key = c10::DispatchKey;
  return op.hasKernelForDispatchKey(kMetaKey) ||
         op.hasKernelForDispatchKey(Key::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(Key::CompositeExplicitAutogradNonFunctional) ||
         op.hasKernelForDispatchKey(Key::CompositeImplicitAutograd);
}

bool fits(const at::Tensor& other, const at::Tensor& self) {
  return !other.defined() || other.dim() == 0 ||
         (other.sizes() == self.sizes() && other.scalar_type() == self.scalar_type());
}

// Nothing can be wrong with such arguments. torch's own check is written in Python, and slow.
bool is_plainly_right(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const size_t count = op.schema().arguments().size();
  const auto first = stack.end() - static_cast<std::ptrdiff_t>(count);
  if (count == 0 || !first->isTensor() || op.hasTag(at::Tag::inplace_view)) return false;
  const at::Tensor& self = first->toTensor();
  return self.is_floating_point() &&
         std::all_of(first, stack.end(), [&self](const c10::IValue& value) {
           return value.isTensor() ? fits(value.toTensor(), self) : !value.isTensorList();
         });
}

// Indexing is tagged as dependent on values for the sake of masks.
bool indexes_by_numbers(const OperatorInfo& info, const torch::jit::Stack& stack) {
  if (!info.mixes_devices) return false;
  const c10::IValue& indices = stack.back();
  if (!indices.isOptionalTensorList()) return false;
  for (const std::optional<at::Tensor>& index : indices.toOptionalTensorList()) {
    if (index && (index->scalar_type() == c10::kBool || index->scalar_type() == c10::kByte))
      return false;
  }
  return true;
}

void give_back_argument(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  c10::IValue first = stack[stack.size() - schema.arguments().size()];
  torch::jit::drop(stack, schema.arguments().size());
  if (!schema.returns().empty()) stack.push_back(std::move(first));
}

// Printing looks for numbers other than zero; on a dry device there are none.
void find_nothing(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const at::Tensor self = stack[stack.size() - op.schema().arguments().size()].toTensor();
  torch::jit::drop(stack, op.schema().arguments().size());
  stack.push_back(at::empty({0}, self.options()));
}

}  // namespace

void compute_shapes(const c10::OperatorHandle& op, const OperatorInfo& info,
                    torch::jit::Stack& stack) {
  const bool known = knows_shapes(op);
  if (gives_back_its_argument(op) &&
      (info.is_list_operator || !known || is_plainly_right(op, stack))) {
    give_back_argument(op, stack);
    return;
  }
  if (info.name == "aten::masked_select") {
    find_nothing(op, stack);
    return;
  }
  const bool needs_values =
      (op.hasTag(at::Tag::dynamic_output_shape) && !indexes_by_numbers(info, stack)) ||
      op.hasTag(at::Tag::data_dependent_output);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !needs_values, info.name, ": its result depends on the values of its arguments, and a dry ",
      "virtual device has none. Leave this part out, or run it with enable(dry=False).");
  TORCH_CHECK_NOT_IMPLEMENTED(
      known, info.name, ": a dry virtual device asks torch for the shapes of results, and torch ",
      "has no such kernel (device type 'meta') for this operator. Leave this part out, or run it "
      "with enable(dry=False).");
  op.redispatchBoxed(c10::DispatchKeySet(kMetaKey), &stack);
}

at::Tensor zeros_on_cpu(const at::Tensor& like) {
  const auto options = like.options().device(c10::kCPU);
  return at::empty_strided(like.sizes(), like.strides(), options).zero_();
}

}  // namespace vacc
