// Work between processes that is on its way: ordered and sent off, its results not yet delivered.
#pragma once
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>
#include "../core/scheduler.h"
#include "../tensor_access.h"
#include "staging.h"

namespace vacc {

struct JointTimes {
  int64_t ready_ns;  // when all processes could begin
  int64_t duration_ns;
};

struct Transfer {
  const char* operation;
  int64_t sent_nbytes;
  ActorId stream;
  Departure departure;  // whose `done` has its time once the transfer is settled
  int64_t duration_ns;
  Tensors tensors;                 // memory in use until then
  std::vector<ByteRange> written;  // by the delivery
  std::vector<c10::intrusive_ptr<c10d::Work>> messages;
  bool tells_arrival = true;          // or only waiting for the messages tells
  std::function<JointTimes()> times;  // called once the messages have arrived,
  std::function<void()> deliver;      // and so is this: it writes the outputs

  std::exception_ptr error;
  bool settled = false;  // guarded by the machine's lock, as all above is
  std::mutex receiving;  // held by the thread that waits for the messages
  bool received = false;

  bool has_arrived() const;
};
using TransferRef = std::shared_ptr<Transfer>;

// Transfers are settled at points that the program fixes (a wait, a synchronisation), never when
// bytes happen to arrive: so virtual time and memory do not depend on the real machine's speed.
class TransfersInFlight {
 public:
  void add(const TransferRef& transfer);
  // Blocks the real host until the transfer, and those before it on its stream, are delivered.
  // Throws when `timeout` passes first; an error of the transfer is kept in it.
  void settle(const TransferRef& transfer, std::chrono::milliseconds timeout = kNoTimeout);
  // What is about to be read by the next work on the same stream.
  void settle_writers_of(ActorId stream, const std::vector<ByteRange>& ranges);
  // Throws the first error among them, once all are settled.
  void settle_device(int device);
  // Their transport goes away: who waits for them yet gets an error.
  void abandon(const std::vector<ActorId>& streams);

 private:
  TransferRef first_unsettled(const Transfer& until);
  static void receive(Transfer& transfer, std::chrono::milliseconds timeout);
  void finish(const TransferRef& transfer);

  std::map<ActorId, std::deque<TransferRef>> queues_;
};

TransfersInFlight& transfers_in_flight();

}  // namespace vacc
