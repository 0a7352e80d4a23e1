#include "group.h"
#include <ATen/ops/empty.h>
#include <algorithm>
#include <cstring>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include "../backing.h"
#include "../cpu_alias.h"
#include "../late.h"
#include "../world.h"
#include "arguments.h"

namespace vacc {
namespace {

// A message begins with when its sender was ready.
constexpr size_t kHeaderNbytes = sizeof(int64_t);
constexpr int kAnyMember = -1;

std::vector<ByteRange> ranges_of(const Tensors& tensors) {
  std::vector<ByteRange> ranges;
  for (const at::Tensor& tensor : tensors) ranges.push_back(byte_range(tensor));
  return ranges;
}

Tensors joined(Tensors first, const Tensors& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

void poison_until_delivered(const Tensors& outputs) {
  if (!late_copies().enabled) return;
  for (const at::Tensor& output : outputs) {
    if (output.numel() > 0) std::memset(output.mutable_data_ptr(), kPoison, output.nbytes());
  }
}

int device_of_barrier(const c10d::BarrierOptions& options,
                      const std::optional<at::Device>& bound_device) {
  if (!options.device_ids.empty()) return static_cast<int>(options.device_ids.front());
  if (options.device && options.device->has_index()) return options.device->index();
  return bound_device ? bound_device->index() : current_device();
}

}  // namespace

Group::Group(c10::intrusive_ptr<c10d::Backend> transport, MakeTransport make_transport)
    : Backend(transport->getRank(), transport->getSize()),
      transport_(std::move(transport)),
      make_transport_(std::move(make_transport)) {}

Group::~Group() {
  std::vector<ActorId> streams;
  for (const auto& [role, stream] : streams_) streams.push_back(actor_of(stream));
  transfers_in_flight().abandon(streams);
}

c10::intrusive_ptr<Group::Options> Group::getBackendOptions() {
  return transport_->getBackendOptions();
}

c10::intrusive_ptr<c10d::Backend> Group::split(const c10::intrusive_ptr<c10d::Store>& store,
                                               const std::vector<int>& ranks,
                                               const c10::intrusive_ptr<Options>& options) {
  const auto own = std::find(ranks.begin(), ranks.end(), getRank());
  if (own == ranks.end()) return nullptr;
  // Parts share the store, and are told apart by their names.
  auto own_store = c10::make_intrusive<c10d::PrefixStore>(options->group_name + "/vccl", store);
  auto part = make_transport_(own_store, static_cast<int>(own - ranks.begin()),
                              static_cast<int>(ranks.size()), options->timeout);
  return c10::make_intrusive<Group>(std::move(part), make_transport_);
}

void Group::setTimeout(Milliseconds timeout) { transport_->setTimeout(timeout); }
void Group::setSequenceNumberForGroup() { transport_->setSequenceNumberForGroup(); }
uint64_t Group::getSequenceNumberForGroup() { return transport_->getSequenceNumberForGroup(); }
void Group::abort() { transport_->abort(); }
void Group::shutdown() { transport_->shutdown(); }

std::string Group::Role::text() const {
  const std::string member = peer == kAnyMember ? "any member" : "member " + std::to_string(peer);
  switch (kind) {
    case Kind::kSends:
      return "messages to " + member;
    case Kind::kReceives:
      return "messages from " + member;
    case Kind::kFutures:
      return "futures";
    default:
      return "collectives";
  }
}

c10::Stream Group::stream_of(int device, const Role& role) {
  Locked machine;
  const auto known = streams_.find({device, role});
  if (known != streams_.end()) return known->second;
  const c10::Stream stream = new_stream(device);
  machine->scheduler.describe(actor_of(stream), role.text() + " of group " + pg_uid_);
  return streams_.emplace(std::make_pair(device, role), stream).first->second;
}

// Tells detector and late mode what is about to happen on the stream of `role`.
TransferRef Group::announce(const Call& call, const Role& role) {
  const Tensors tensors = joined(call.inputs, call.outputs);
  check_tensors(call.name, tensors, call.device);
  auto transfer = std::make_shared<Transfer>();
  transfer->operation = call.name;
  transfer->sent_nbytes = static_cast<int64_t>(call.sent_nbytes);
  transfer->stream = actor_of(stream_of(call.device, role));
  transfer->tensors = tensors;
  transfer->written = ranges_of(call.outputs);
  transfers_in_flight().settle_writers_of(transfer->stream, ranges_of(call.inputs));
  {
    Locked machine;
    transfer->departure = machine->scheduler.depart(transfer->stream, current_actor(call.device));
    transfer->duration_ns = machine->scheduler.profile.interconnect_ns(call.sent_nbytes);
    for (const at::Tensor& input : call.inputs)
      note_access(input, transfer->stream, false, call.name);
    for (const at::Tensor& output : call.outputs)
      note_access(output, transfer->stream, true, call.name);
    late_copies().run_before({transfer->stream, ranges_of(tensors)});
  }
  world().raise_new_races();
  return transfer;
}

// All members learn when the last of them is ready, and who has most to send.
Group::WorkRef Group::share_clocks(const Call& call, Transfer& transfer) {
  const at::Tensor times = at::empty({2}, at::TensorOptions().dtype(at::kLong));
  auto* values = times.mutable_data_ptr<int64_t>();
  values[0] = transfer.departure.ready_ns;
  values[1] = transfer.duration_ns;
  transfer.times = [times] {
    const auto* latest = times.const_data_ptr<int64_t>();
    return JointTimes{latest[0], latest[1]};
  };
  c10d::AllreduceOptions latest;
  latest.reduceOp = c10d::ReduceOp::MAX;
  latest.timeout = call.timeout;
  Tensors clocks{times};
  return transport_->allreduce(clocks, latest);
}

Group::WorkRef Group::collective(const Call& call, const std::function<Sent()>& send) {
  const TransferRef transfer = announce(call, {Role::Kind::kCollectives});
  const CpuKernelScope scope;
  transfer->messages.push_back(share_clocks(call, *transfer));
  Sent sent = send();
  transfer->messages.push_back(std::move(sent.message));
  transfer->deliver = std::move(sent.deliver);
  poison_until_delivered(call.outputs);
  return hand_out(call, transfer);
}

Group::WorkRef Group::hand_out(const Call& call, const TransferRef& transfer) {
  transfers_in_flight().add(transfer);
  if (batch_) {
    batch_->transfers.push_back(transfer);
    batch_->results = joined(batch_->results, call.results);
    batch_->device = call.device;
  }
  return c10::make_intrusive<GroupWork>(rank_, call.type, std::vector<TransferRef>{transfer},
                                        call.results,
                                        stream_of(call.device, {Role::Kind::kFutures}));
}

void Group::startCoalescing() { batch_.emplace(); }

Group::WorkRef Group::endCoalescing() {
  TORCH_CHECK(batch_, "endCoalescing: expected a call of startCoalescing before it.");
  Batch batch = std::move(*batch_);
  batch_.reset();
  if (batch.transfers.empty()) return nullptr;
  return c10::make_intrusive<GroupWork>(rank_, c10d::OpType::COALESCED, std::move(batch.transfers),
                                        std::move(batch.results),
                                        stream_of(batch.device, {Role::Kind::kFutures}));
}

Group::WorkRef Group::send(Tensors& tensors, int to, int tag) {
  constexpr const char* kName = "send";
  const at::Tensor& tensor = only_one(kName, tensors);
  const Call call{.name = kName,
                  .type = c10d::OpType::SEND,
                  .inputs = tensors,
                  .sent_nbytes = tensor.nbytes(),
                  .device = tensor.device().index()};
  const TransferRef transfer = announce(call, {Role::Kind::kSends, to, tag});
  const CpuKernelScope scope;
  const at::Tensor message = empty_bytes(kHeaderNbytes + tensor.nbytes());
  std::memcpy(address_in(message, 0), &transfer->departure.ready_ns, kHeaderNbytes);
  pack(whole(tensors), message, kHeaderNbytes);
  transfer->times = [times = JointTimes{transfer->departure.ready_ns, transfer->duration_ns}] {
    return times;
  };
  transfer->deliver = [] {};
  transfer->tells_arrival = false;
  Tensors messages{message};
  transfer->messages.push_back(transport_->send(messages, to, tag));
  return hand_out(call, transfer);
}

Group::WorkRef Group::recv(Tensors& tensors, int from, int tag) {
  return receive(tensors, from, tag);
}

Group::WorkRef Group::recvAnysource(Tensors& tensors, int tag) {
  return receive(tensors, kAnyMember, tag);
}

Group::WorkRef Group::receive(Tensors& tensors, int from, int tag) {
  constexpr const char* kName = "recv";
  const at::Tensor& tensor = only_one(kName, tensors);
  const Call call{.name = kName,
                  .type = c10d::OpType::RECV,
                  .outputs = tensors,
                  .sent_nbytes = tensor.nbytes(),
                  .results = tensors,
                  .device = tensor.device().index()};
  const TransferRef transfer = announce(call, {Role::Kind::kReceives, from, tag});
  const CpuKernelScope scope;
  const at::Tensor message = empty_bytes(kHeaderNbytes + tensor.nbytes());
  transfer->times = [message, own = JointTimes{transfer->departure.ready_ns,
                                               transfer->duration_ns}] {
    int64_t sender_ready_ns;
    std::memcpy(&sender_ready_ns, address_in(message, 0), kHeaderNbytes);
    return JointTimes{std::max(own.ready_ns, sender_ready_ns), own.duration_ns};
  };
  transfer->deliver = [message, to = whole(tensors)] { unpack(message, kHeaderNbytes, to); };
  transfer->tells_arrival = false;
  Tensors messages{message};
  transfer->messages.push_back(from == kAnyMember ? transport_->recvAnysource(messages, tag)
                                                  : transport_->recv(messages, from, tag));
  poison_until_delivered(tensors);
  return hand_out(call, transfer);
}

Group::WorkRef Group::barrier(const c10d::BarrierOptions& options) {
  const Call call{.name = "barrier",
                  .type = c10d::OpType::BARRIER,
                  .device = device_of_barrier(options, bound_device_id_),
                  .timeout = options.timeout};
  const TransferRef transfer = announce(call, {Role::Kind::kCollectives});
  const CpuKernelScope scope;
  transfer->messages.push_back(share_clocks(call, *transfer));
  transfer->deliver = [] {};
  return hand_out(call, transfer);
}

}  // namespace vacc
