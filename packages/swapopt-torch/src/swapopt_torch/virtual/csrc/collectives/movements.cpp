// The collectives that only move bytes, of any dtype.
#include <algorithm>
#include "../core/ring.h"
#include "arguments.h"
#include "group.h"

namespace vacc {
namespace {

Tensors flattened(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

std::vector<Pieces> one_each(const Pieces& pieces) {
  std::vector<Pieces> lists;
  for (const Piece& piece : pieces) lists.push_back({piece});
  return lists;
}

Pieces joined(const std::vector<Pieces>& lists) {
  Pieces all;
  for (const Pieces& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

size_t nbytes_beside(const std::vector<Pieces>& lists, int own) {
  return nbytes_of(joined(lists)) - nbytes_of(lists[static_cast<size_t>(own)]);
}

std::vector<int64_t> counts_of(const std::vector<Pieces>& lists) {
  std::vector<int64_t> counts;
  for (const Pieces& list : lists) counts.push_back(static_cast<int64_t>(nbytes_of(list)));
  return counts;
}

}  // namespace

Group::WorkRef Group::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  constexpr const char* kName = "broadcast";
  const at::Tensor& tensor = only_one(kName, tensors);
  const bool is_root = options.rootRank == rank_;
  const Call call{.name = kName,
                  .type = c10d::OpType::BROADCAST,
                  .inputs = is_root ? tensors : Tensors{},
                  .outputs = is_root ? Tensors{} : tensors,
                  .sent_nbytes = chain_nbytes(tensor.nbytes(), size_),
                  .results = tensors,
                  .device = index_of_device(tensor),
                  .timeout = options.timeout};
  return collective(call, [&] {
    const at::Tensor bytes = empty_bytes(tensor.nbytes());
    pack(whole(call.inputs), bytes, 0);
    Tensors staged{bytes};
    return Sent{transport_->broadcast(staged, options),
                [bytes, to = whole(call.outputs)] { unpack(bytes, 0, to); }};
  });
}

Group::WorkRef Group::allgather(TensorLists& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& options) {
  constexpr const char* kName = "all_gather";
  const at::Tensor& input = only_one(kName, inputs);
  const Tensors& list = only_one(kName, outputs);
  check_list(kName, list, size_);
  check_same_numel(kName, input, list[static_cast<size_t>(rank_)]);
  return gather_everywhere({.name = kName,
                            .type = c10d::OpType::ALLGATHER,
                            .inputs = inputs,
                            .outputs = list,
                            .results = list,
                            .device = index_of_device(input),
                            .timeout = options.timeout},
                           one_each(whole(list)));
}

Group::WorkRef Group::_allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& options) {
  constexpr const char* kName = "all_gather_into_tensor";
  check_gathered(kName, output, input, size_);
  return gather_everywhere({.name = kName,
                            .type = c10d::OpType::_ALLGATHER_BASE,
                            .inputs = {input},
                            .outputs = {output},
                            .results = {output},
                            .device = index_of_device(input),
                            .timeout = options.timeout},
                           one_each(parts_of(output, size_)));
}

Group::WorkRef Group::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  constexpr const char* kName = "all_gather_coalesced";
  check_lists(kName, outputs, size_);
  std::vector<Pieces> from;
  for (const Tensors& list : outputs) {
    check_list(kName, list, static_cast<int>(inputs.size()));
    for (size_t i = 0; i < inputs.size(); ++i) check_same_numel(kName, inputs[i], list[i]);
    from.push_back(whole(list));
  }
  const Tensors all = flattened(outputs);
  return gather_everywhere({.name = kName,
                            .type = c10d::OpType::ALLGATHER_COALESCED,
                            .inputs = inputs,
                            .outputs = all,
                            .results = all,
                            .device = index_of_device(first_of(kName, inputs)),
                            .timeout = options.timeout},
                           std::move(from));
}

Group::WorkRef Group::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) {
  constexpr const char* kName = "all_gather_into_tensor_coalesced";
  check_list(kName, outputs, static_cast<int>(inputs.size()));
  std::vector<Pieces> from(static_cast<size_t>(size_));
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_gathered(kName, outputs[i], inputs[i], size_);
    const Pieces parts = parts_of(outputs[i], size_);
    for (size_t member = 0; member < parts.size(); ++member)
      from[member].push_back(parts[member]);
  }
  return gather_everywhere({.name = kName,
                            .type = c10d::OpType::COALESCED,
                            .inputs = inputs,
                            .outputs = outputs,
                            .results = outputs,
                            .device = index_of_device(first_of(kName, inputs)),
                            .timeout = options.timeout},
                           std::move(from));
}

// Members may send different amounts: the transport's messages are as long as the longest.
Group::WorkRef Group::gather_everywhere(Call call, std::vector<Pieces> from) {
  size_t longest_nbytes = 0;
  for (const Pieces& pieces : from) longest_nbytes = std::max(longest_nbytes, nbytes_of(pieces));
  call.sent_nbytes = nbytes_beside(from, rank_);
  return collective(call, [&] {
    at::Tensor own = empty_bytes(longest_nbytes);
    pack(whole(call.inputs), own, 0);
    at::Tensor all = empty_bytes(longest_nbytes * static_cast<size_t>(size_));
    c10d::AllgatherOptions options;
    options.timeout = call.timeout;
    return Sent{transport_->_allgather_base(all, own, options),
                [all, longest_nbytes, from = std::move(from)] {
                  for (size_t member = 0; member < from.size(); ++member)
                    unpack(all, member * longest_nbytes, from[member]);
                }};
  });
}

Group::WorkRef Group::gather(TensorLists& outputs, Tensors& inputs,
                             const c10d::GatherOptions& options) {
  constexpr const char* kName = "gather";
  const at::Tensor& input = only_one(kName, inputs);
  const bool is_root = options.rootRank == rank_;
  const Tensors list = is_root ? only_one(kName, outputs) : Tensors{};
  std::vector<Pieces> to(static_cast<size_t>(size_)), from(static_cast<size_t>(size_));
  to.at(static_cast<size_t>(options.rootRank)) = whole(inputs);
  if (is_root) {
    check_list(kName, list, size_);
    check_same_numel(kName, input, list[static_cast<size_t>(rank_)]);
    from = one_each(whole(list));
  }
  return exchange({.name = kName,
                   .type = c10d::OpType::GATHER,
                   .inputs = inputs,
                   .outputs = list,
                   .results = list,
                   .device = index_of_device(input),
                   .timeout = options.timeout},
                  to, std::move(from));
}

Group::WorkRef Group::scatter(Tensors& outputs, TensorLists& inputs,
                              const c10d::ScatterOptions& options) {
  constexpr const char* kName = "scatter";
  const at::Tensor& output = only_one(kName, outputs);
  const bool is_root = options.rootRank == rank_;
  const Tensors list = is_root ? only_one(kName, inputs) : Tensors{};
  std::vector<Pieces> to(static_cast<size_t>(size_)), from(static_cast<size_t>(size_));
  from.at(static_cast<size_t>(options.rootRank)) = whole(outputs);
  if (is_root) {
    check_list(kName, list, size_);
    check_same_numel(kName, list[static_cast<size_t>(rank_)], output);
    to = one_each(whole(list));
  }
  return exchange({.name = kName,
                   .type = c10d::OpType::SCATTER,
                   .inputs = list,
                   .outputs = outputs,
                   .results = outputs,
                   .device = index_of_device(output),
                   .timeout = options.timeout},
                  to, std::move(from));
}

Group::WorkRef Group::alltoall(Tensors& outputs, Tensors& inputs,
                               const c10d::AllToAllOptions& options) {
  constexpr const char* kName = "all_to_all";
  check_list(kName, outputs, size_);
  check_list(kName, inputs, size_);
  const auto own = static_cast<size_t>(rank_);
  check_same_numel(kName, inputs[own], outputs[own]);
  return exchange({.name = kName,
                   .type = c10d::OpType::ALLTOALL,
                   .inputs = inputs,
                   .outputs = outputs,
                   .results = outputs,
                   .device = index_of_device(outputs.front()),
                   .timeout = options.timeout},
                  one_each(whole(inputs)), one_each(whole(outputs)));
}

Group::WorkRef Group::alltoall_base(at::Tensor& output, at::Tensor& input,
                                    std::vector<int64_t>& output_counts,
                                    std::vector<int64_t>& input_counts,
                                    const c10d::AllToAllOptions& options) {
  constexpr const char* kName = "all_to_all_single";
  check_same_dtype(kName, input, output);
  check_counts(kName, output, output_counts, size_);
  check_counts(kName, input, input_counts, size_);
  return exchange({.name = kName,
                   .type = c10d::OpType::ALLTOALL_BASE,
                   .inputs = {input},
                   .outputs = {output},
                   .results = {output},
                   .device = index_of_device(output),
                   .timeout = options.timeout},
                  one_each(rows_of(input, input_counts, size_)),
                  one_each(rows_of(output, output_counts, size_)));
}

// Every member sends some bytes to every other, which knows how many.
Group::WorkRef Group::exchange(Call call, const std::vector<Pieces>& to,
                               std::vector<Pieces> from) {
  call.sent_nbytes = std::max(nbytes_beside(to, rank_), nbytes_beside(from, rank_));
  return collective(call, [&] {
    std::vector<int64_t> sent = counts_of(to), received = counts_of(from);
    const Pieces arriving = joined(from);
    at::Tensor outgoing = empty_bytes(nbytes_of(joined(to)));
    at::Tensor incoming = empty_bytes(nbytes_of(arriving));
    pack(joined(to), outgoing, 0);
    c10d::AllToAllOptions options;
    options.timeout = call.timeout;
    return Sent{transport_->alltoall_base(incoming, outgoing, received, sent, options),
                [incoming, arriving] { unpack(incoming, 0, arriving); }};
  });
}

}  // namespace vacc
