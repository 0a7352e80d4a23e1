// LSTM and GRU cells. torch expects a fused kernel for them from a device like this one and has
// none on the CPU; registered for the CPU, they are within reach of the fallback.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>
#include <optional>
#include <tuple>
#include <vector>

namespace vacc {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor join(std::vector<Tensor> gates) { return at::cat(gates, 1); }

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

// Gates are rows of [input, forget, cell, output], each hidden_size wide.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& cell, const OptionalTensor& input_bias,
                                             const OptionalTensor& hidden_bias) {
  const auto gates =
      (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const Tensor in = at::sigmoid(gates[0]), forget = at::sigmoid(gates[1]);
  const Tensor candidate = at::tanh(gates[2]), out = at::sigmoid(gates[3]);
  const Tensor new_cell = forget * cell + in * candidate;
  return {out * at::tanh(new_cell), new_cell, join({in, forget, candidate, out})};
}

Tensor or_zeros(const OptionalTensor& gradient, const Tensor& like) {
  return gradient && gradient->defined() ? *gradient : at::zeros_like(like);
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptionalTensor& grad_hidden,
                                                      const OptionalTensor& grad_cell,
                                                      const Tensor& cell, const Tensor& new_cell,
                                                      const Tensor& workspace, bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &candidate = gates[2], &out = gates[3];
  const Tensor grad_out = or_zeros(grad_hidden, new_cell);
  const Tensor squashed = at::tanh(new_cell);
  const Tensor grad = or_zeros(grad_cell, new_cell) + grad_out * out * (1 - squashed * squashed);
  const Tensor grad_gates =
      join({grad * candidate * in * (1 - in), grad * cell * forget * (1 - forget),
            grad * in * (1 - candidate * candidate), grad_out * squashed * out * (1 - out)});
  return {grad_gates, grad * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

// Gates are rows of [reset, update, new].
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                    const Tensor& hidden, const OptionalTensor& input_bias,
                                    const OptionalTensor& hidden_bias) {
  const auto from_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto from_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor reset = at::sigmoid(from_input[0] + from_hidden[0]);
  const Tensor update = at::sigmoid(from_input[1] + from_hidden[1]);
  const Tensor candidate = at::tanh(from_input[2] + reset * from_hidden[2]);
  return {(hidden - candidate) * update + candidate,
          join({reset, update, candidate, hidden, from_hidden[2]})};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad,
                                                                     const Tensor& workspace,
                                                                     bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const Tensor &reset = saved[0], &update = saved[1], &candidate = saved[2], &hidden = saved[3],
               &hidden_part = saved[4];
  const Tensor grad_candidate = grad * (1 - update) * (1 - candidate * candidate);
  const Tensor grad_update = grad * (hidden - candidate) * update * (1 - update);
  const Tensor grad_reset = grad_candidate * hidden_part * reset * (1 - reset);
  const Tensor grad_input_gates = join({grad_reset, grad_update, grad_candidate});
  const Tensor grad_hidden_gates = join({grad_reset, grad_update, grad_candidate * reset});
  return {grad_input_gates, grad_hidden_gates, grad * update,
          has_bias ? grad_input_gates.sum(0) : Tensor(),
          has_bias ? grad_hidden_gates.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

}  // namespace
}  // namespace vacc
