// torch chooses an attention kernel by device: choose the CPU's.
#include <ATen/core/Tensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <optional>
#include "cpu_alias.h"

namespace vacc {
namespace {

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
  return at::_fused_sdp_choice(attention_argument(query), attention_argument(key),
                               attention_argument(value), cpu_mask, dropout, causal, scale,
                               grouped_query);
}

}  // namespace
}  // namespace vacc

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &vacc::choose_attention)
}
