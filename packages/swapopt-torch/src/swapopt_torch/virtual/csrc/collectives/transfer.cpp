#include "transfer.h"
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include "../world.h"

namespace vacc {

bool Transfer::has_arrived() const {
  return std::all_of(messages.begin(), messages.end(),
                     [](const auto& message) { return message->isCompleted(); });
}

TransfersInFlight& transfers_in_flight() {
  static auto* instance = new TransfersInFlight();
  return *instance;
}

void TransfersInFlight::add(const TransferRef& transfer) {
  const Locked machine;
  queues_[transfer->stream].push_back(transfer);
}

void TransfersInFlight::settle(const TransferRef& transfer, std::chrono::milliseconds timeout) {
  while (const TransferRef next = first_unsettled(*transfer)) {
    receive(*next, timeout);
    finish(next);
  }
}

void TransfersInFlight::settle_writers_of(ActorId stream, const std::vector<ByteRange>& ranges) {
  TransferRef last;
  {
    const Locked machine;
    for (const TransferRef& transfer : queues_[stream]) {
      for (const ByteRange& written : transfer->written) {
        const bool needed =
            std::any_of(ranges.begin(), ranges.end(),
                        [&](const ByteRange& range) { return range.overlaps(written); });
        if (needed) last = transfer;
      }
    }
  }
  if (last != nullptr) settle(last);
}

void TransfersInFlight::settle_device(int device) {
  std::vector<TransferRef> all;
  {
    const Locked machine;
    for (const auto& [stream, queue] : queues_) {
      if (world().scheduler.at(stream).device == device)
        all.insert(all.end(), queue.begin(), queue.end());
    }
  }
  for (const TransferRef& transfer : all) settle(transfer);
  for (const TransferRef& transfer : all) {
    if (transfer->error) std::rethrow_exception(transfer->error);
  }
}

void TransfersInFlight::abandon(const std::vector<ActorId>& streams) {
  std::deque<TransferRef> abandoned;  // dropped after the lock, as in finish()
  const Locked machine;
  for (const ActorId stream : streams) {
    const auto queue = queues_.find(stream);
    if (queue == queues_.end()) continue;
    for (const TransferRef& transfer : queue->second) {
      transfer->settled = true;
      transfer->error = std::make_exception_ptr(std::runtime_error(
          std::string(transfer->operation) +
          ": the process group was destroyed before anyone waited for it. Wait for all works "
          "before destroy_process_group()."));
      abandoned.push_back(transfer);
    }
    queues_.erase(queue);
  }
}

TransferRef TransfersInFlight::first_unsettled(const Transfer& until) {
  const Locked machine;
  return until.settled ? nullptr : queues_.at(until.stream).front();
}

void TransfersInFlight::receive(Transfer& transfer, std::chrono::milliseconds timeout) {
  const std::lock_guard<std::mutex> guard(transfer.receiving);
  if (transfer.received) return;
  for (const auto& message : transfer.messages) {
    try {
      message->wait(timeout);
    } catch (...) {
      const bool still_on_its_way = !message->isCompleted();
      if (still_on_its_way) throw;
      transfer.error = std::current_exception();
      break;
    }
  }
  transfer.received = true;
}

void TransfersInFlight::finish(const TransferRef& transfer) {
  // Dropped after the lock: the last reference to a tensor may need Python's.
  Tensors tensors;
  std::function<void()> deliver;
  const Locked machine;
  if (transfer->settled) return;
  transfer->settled = true;
  queues_.at(transfer->stream).pop_front();
  tensors = std::move(transfer->tensors);
  deliver = std::move(transfer->deliver);
  if (transfer->error) return;
  const JointTimes times = transfer->times();
  world().scheduler.arrive(
      transfer->stream, transfer->departure.done,
      {Lane::kCollective, transfer->operation, transfer->sent_nbytes, times.duration_ns},
      times.ready_ns);
  try {
    deliver();
  } catch (...) {
    transfer->error = std::current_exception();
  }
}

}  // namespace vacc
