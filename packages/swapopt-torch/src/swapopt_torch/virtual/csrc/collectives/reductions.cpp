// The collectives that add up, or reduce in another way: gloo does it, on copies.
#include <ATen/ops/mul.h>
#include "../core/ring.h"
#include "../cpu_alias.h"
#include "arguments.h"
#include "group.h"

namespace vacc {
namespace {

// The factor of a sum of products; of other reductions there is none.
const c10d::PreMulSumSupplement* premul_of(const c10d::ReduceOp& reduction) {
  if (reduction.op_ != c10d::ReduceOp::PREMUL_SUM) return nullptr;
  return static_cast<const c10d::PreMulSumSupplement*>(reduction.supplement_.get());
}

Tensors with_factor(Tensors inputs, const c10d::ReduceOp& reduction) {
  const c10d::PreMulSumSupplement* premul = premul_of(reduction);
  if (premul != nullptr && premul->tensor_factor.defined()) inputs.push_back(premul->tensor_factor);
  return inputs;
}

// gloo has no sum of products with a factor: they are multiplied before.
template <typename Options>
Options without_factor(Options options, const Tensors& staged) {
  const c10d::PreMulSumSupplement* premul = premul_of(options.reduceOp);
  if (premul == nullptr) return options;
  const at::Scalar value = premul->tensor_factor.defined()
                               ? cpu_alias(premul->tensor_factor).item()
                               : at::Scalar(premul->double_factor);
  for (const at::Tensor& tensor : staged) tensor.mul_(value);
  options.reduceOp = c10d::ReduceOp(c10d::ReduceOp::SUM);
  return options;
}

}  // namespace

Group::WorkRef Group::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  constexpr const char* kName = "all_reduce";
  const at::Tensor& tensor = only_one(kName, tensors);
  const Call call{.name = kName,
                  .type = c10d::OpType::ALLREDUCE,
                  .inputs = with_factor(tensors, options.reduceOp),
                  .outputs = tensors,
                  .sent_nbytes = ring_all_reduce_nbytes(tensor.nbytes(), size_),
                  .results = tensors,
                  .device = index_of_device(tensor),
                  .timeout = options.timeout};
  return collective(call, [&] {
    Tensors staged = staged_copies(tensors);
    return Sent{transport_->allreduce(staged, without_factor(options, staged)),
                [staged, to = call.outputs] { copy_back(staged, to); }};
  });
}

Group::WorkRef Group::allreduce_coalesced(Tensors& tensors,
                                          const c10d::AllreduceCoalescedOptions& options) {
  constexpr const char* kName = "all_reduce_coalesced";
  const Call call{.name = kName,
                  .type = c10d::OpType::ALLREDUCE_COALESCED,
                  .inputs = with_factor(tensors, options.reduceOp),
                  .outputs = tensors,
                  .sent_nbytes = ring_all_reduce_nbytes(nbytes_of(tensors), size_),
                  .results = tensors,
                  .device = index_of_device(first_of(kName, tensors)),
                  .timeout = options.timeout};
  return collective(call, [&] {
    Tensors staged = staged_copies(tensors);
    return Sent{transport_->allreduce_coalesced(staged, without_factor(options, staged)),
                [staged, to = call.outputs] { copy_back(staged, to); }};
  });
}

Group::WorkRef Group::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  constexpr const char* kName = "reduce";
  const at::Tensor& tensor = only_one(kName, tensors);
  const bool is_root = options.rootRank == rank_;
  const Call call{.name = kName,
                  .type = c10d::OpType::REDUCE,
                  .inputs = with_factor(tensors, options.reduceOp),
                  .outputs = is_root ? tensors : Tensors{},
                  .sent_nbytes = chain_nbytes(tensor.nbytes(), size_),
                  .results = tensors,
                  .device = index_of_device(tensor),
                  .timeout = options.timeout};
  return collective(call, [&] {
    Tensors staged = staged_copies(tensors);
    return Sent{transport_->reduce(staged, without_factor(options, staged)),
                [staged, to = call.outputs] { copy_back(staged, to); }};
  });
}

Group::WorkRef Group::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                     const c10d::ReduceScatterOptions& options) {
  constexpr const char* kName = "reduce_scatter";
  const at::Tensor& output = only_one(kName, outputs);
  const Tensors& input = only_one(kName, inputs);
  check_list(kName, input, size_);
  check_same_numel(kName, input[static_cast<size_t>(rank_)], output);
  const Call call{.name = kName,
                  .type = c10d::OpType::REDUCE_SCATTER,
                  .inputs = with_factor(input, options.reduceOp),
                  .outputs = outputs,
                  .sent_nbytes = ring_pass_nbytes(nbytes_of(input), size_),
                  .results = outputs,
                  .device = index_of_device(output),
                  .timeout = options.timeout};
  return collective(call, [&] {
    TensorLists staged{staged_copies(input)};
    Tensors sums = staged_results_like(outputs);
    return Sent{transport_->reduce_scatter(sums, staged, without_factor(options, staged.front())),
                [sums, to = call.outputs] { copy_back(sums, to); }};
  });
}

Group::WorkRef Group::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& options) {
  return reduce_scatter_flat("reduce_scatter_tensor", c10d::OpType::_REDUCE_SCATTER_BASE, {output},
                             {input}, options);
}

Group::WorkRef Group::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& options) {
  return reduce_scatter_flat("reduce_scatter_tensor_coalesced",
                             c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs, inputs,
                             options);
}

Group::WorkRef Group::reduce_scatter_flat(const char* name, c10d::OpType type,
                                          const Tensors& outputs, const Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) {
  check_list(name, outputs, static_cast<int>(inputs.size()));
  for (size_t i = 0; i < inputs.size(); ++i) check_gathered(name, inputs[i], outputs[i], size_);
  const Call call{.name = name,
                  .type = type,
                  .inputs = with_factor(inputs, options.reduceOp),
                  .outputs = outputs,
                  .sent_nbytes = ring_pass_nbytes(nbytes_of(inputs), size_),
                  .results = outputs,
                  .device = index_of_device(first_of(name, outputs)),
                  .timeout = options.timeout};
  return collective(call, [&] {
    Tensors staged = staged_copies(inputs);
    Tensors sums = staged_results_like(outputs);
    return Sent{transport_->reduce_scatter_tensor_coalesced(sums, staged,
                                                            without_factor(options, staged)),
                [sums, to = call.outputs] { copy_back(sums, to); }};
  });
}

}  // namespace vacc
