// What a program holds of a collective: waiting for it orders streams, as on a real device.
#pragma once
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>
#include "transfer.h"

namespace vacc {

class GroupWork final : public c10d::Work {
 public:
  GroupWork(int rank, c10d::OpType type, std::vector<TransferRef> transfers, Tensors results,
            c10::Stream bridge);

  // Orders the caller's current stream after the work. That blocks the real host; the virtual one
  // only for a barrier.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  void abort() override;
  Tensors result() override { return results_; }
  // Completed when it is returned; what runs after it is ordered after the work.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void settle(std::chrono::milliseconds timeout);
  void order(ActorId stream);
  void wait_on_host();

  std::vector<TransferRef> transfers_;
  Tensors results_;
  c10::Stream bridge_;  // a stream of the group for the events of futures
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace vacc
