// A process group of virtual devices: torch's gloo backend carries the bytes, this one orders them.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <tuple>
#include <utility>
#include <vector>
#include "group_work.h"
#include "staging.h"

namespace vacc {

class Group final : public c10d::Backend {
 public:
  using WorkRef = c10::intrusive_ptr<c10d::Work>;
  using TensorLists = std::vector<Tensors>;
  using Milliseconds = std::chrono::milliseconds;

  using StoreRef = c10::intrusive_ptr<c10d::Store>;
  // Makes what carries the bytes of a new group: of a store, the rank here, the size, a timeout.
  using MakeTransport = std::function<c10::intrusive_ptr<c10d::Backend>(const StoreRef&, int, int,
                                                                        Milliseconds)>;

  // `transport` moves CPU tensors between the same processes; a group that is split makes those
  // of its parts.
  Group(c10::intrusive_ptr<c10d::Backend> transport, MakeTransport make_transport);
  ~Group() override;

  const std::string getBackendName() const override { return "vccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  void setTimeout(Milliseconds timeout) override;
  void setSequenceNumberForGroup() override;
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  void abort() override;
  void shutdown() override;

  void startCoalescing() override;
  WorkRef endCoalescing() override;

  WorkRef broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkRef allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkRef allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkRef reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkRef reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkRef _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkRef reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;

  WorkRef allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkRef _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkRef allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkRef allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;

  WorkRef gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkRef scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkRef alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkRef alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_counts, std::vector<int64_t>& input_counts,
                        const c10d::AllToAllOptions& options) override;

  WorkRef send(Tensors& tensors, int to, int tag) override;
  WorkRef recv(Tensors& tensors, int from, int tag) override;
  WorkRef recvAnysource(Tensors& tensors, int tag) override;

  WorkRef barrier(const c10d::BarrierOptions& options) override;

 private:
  struct Call {
    const char* name;
    c10d::OpType type;
    Tensors inputs, outputs;
    size_t sent_nbytes = 0;  // that this member sends or receives, whichever is more
    Tensors results;         // what the work hands out
    int device = -1;
    Milliseconds timeout = c10d::kUnsetTimeout;
  };
  struct Sent {
    WorkRef message;
    std::function<void()> deliver;
  };
  // Whom a stream serves: collectives of all members; messages of one tag to or from one member,
  // which wait for no others; or the futures of works.
  struct Role {
    enum class Kind { kCollectives, kSends, kReceives, kFutures } kind;
    int peer = 0;
    int tag = 0;
    bool operator<(const Role& other) const {
      return std::tie(kind, peer, tag) < std::tie(other.kind, other.peer, other.tag);
    }
    std::string text() const;
  };
  struct Batch {
    std::vector<TransferRef> transfers;
    Tensors results;
    int device = -1;
  };

  c10::Stream stream_of(int device, const Role& role);
  TransferRef announce(const Call& call, const Role& role);
  WorkRef share_clocks(const Call& call, Transfer& transfer);
  // `send` gives the bytes to the transport, and says how to deliver what comes back.
  WorkRef collective(const Call& call, const std::function<Sent()>& send);
  WorkRef receive(Tensors& tensors, int from, int tag);
  WorkRef hand_out(const Call& call, const TransferRef& transfer);

  // `from`: where the bytes of each member go; `to`: the bytes for each member.
  WorkRef gather_everywhere(Call call, std::vector<Pieces> from);
  WorkRef exchange(Call call, const std::vector<Pieces>& to, std::vector<Pieces> from);
  WorkRef reduce_scatter_flat(const char* name, c10d::OpType type, const Tensors& outputs,
                              const Tensors& inputs, const c10d::ReduceScatterOptions& options);

  c10::intrusive_ptr<c10d::Backend> transport_;
  MakeTransport make_transport_;
  std::map<std::pair<int, Role>, c10::Stream> streams_;
  std::optional<Batch> batch_;
};

}  // namespace vacc
