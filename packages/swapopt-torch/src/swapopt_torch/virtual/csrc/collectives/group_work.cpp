#include "group_work.h"
#include <c10/core/StreamGuard.h>
#include <algorithm>
#include <utility>
#include "../host_waits.h"

namespace vacc {

GroupWork::GroupWork(int rank, c10d::OpType type, std::vector<TransferRef> transfers,
                     Tensors results, c10::Stream bridge)
    : Work(rank, type),
      transfers_(std::move(transfers)),
      results_(std::move(results)),
      bridge_(bridge) {}

bool GroupWork::wait(std::chrono::milliseconds timeout) {
  settle(timeout);
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  order(current_actor(bridge_.device_index()));
  if (opType_ == c10d::OpType::BARRIER) wait_on_host();
  return true;
}

bool GroupWork::isCompleted() {
  for (const TransferRef& transfer : transfers_) {
    if (transfer->tells_arrival && !transfer->has_arrived()) return false;
  }
  settle(kNoTimeout);
  if (exception()) return true;
  return host_asks([this](Scheduler& scheduler) {
    return std::all_of(transfers_.begin(), transfers_.end(), [&](const TransferRef& transfer) {
      return scheduler.poll_event(transfer->departure.done);
    });
  });
}

bool GroupWork::isSuccess() const {
  const Locked machine;
  for (const TransferRef& transfer : transfers_) {
    if (!transfer->settled || transfer->error) return false;
  }
  return true;
}

std::exception_ptr GroupWork::exception() const {
  const Locked machine;
  for (const TransferRef& transfer : transfers_) {
    if (transfer->error) return transfer->error;
  }
  return nullptr;
}

int GroupWork::sourceRank() const { return transfers_.at(0)->messages.at(0)->sourceRank(); }

void GroupWork::abort() {
  for (const TransferRef& transfer : transfers_) {
    for (const auto& message : transfer->messages) message->abort();
  }
}

c10::intrusive_ptr<c10::ivalue::Future> GroupWork::getFuture() {
  if (future_) return future_;
  settle(kNoTimeout);
  future_ = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{bridge_.device()});
  if (const std::exception_ptr error = exception()) {
    future_->setError(error);
    return future_;
  }
  order(actor_of(bridge_));
  const c10::StreamGuard events_are_recorded_here(bridge_);
  future_->markCompleted(c10::IValue(results_));
  return future_;
}

void GroupWork::settle(std::chrono::milliseconds timeout) {
  for (const TransferRef& transfer : transfers_) transfers_in_flight().settle(transfer, timeout);
}

void GroupWork::order(ActorId stream) {
  Locked machine;
  for (const TransferRef& transfer : transfers_) machine->scheduler.wait(stream, transfer->departure.done);
}

void GroupWork::wait_on_host() {
  host_waits([this](Scheduler& scheduler) {
    for (const TransferRef& transfer : transfers_)
      scheduler.host_waits_for(transfer->departure.done);
  });
}

}  // namespace vacc
