// Late mode: an asynchronous copy happens only when something ordered after it needs its bytes.
// Until then its destination is poisoned. A pending copy keeps no memory alive for the program.
#pragma once
#include <ATen/core/Tensor.h>
#include <list>
#include <memory>
#include <vector>
#include "backing.h"
#include "core/shadow_memory.h"
#include "tensor_access.h"

namespace vacc {

struct Toucher {  // someone about to read or write `ranges`
  ActorId actor;
  std::vector<ByteRange> ranges;
};

class LateCopies {
 public:
  bool enabled = false;
  bool idle() const { return pending_.empty(); }

  // `source` and `destination` are CPU tensors over the raw memory; neither owns it.
  void defer(ActorId stream, const at::Tensor& source, const at::Tensor& destination);
  void run_before(const Toucher& toucher);
  void run_before_host();
  void run_all();
  // Memory goes away. Copies that must be over by then keep the raw bytes; others lose them.
  void on_release(const Block& block, const std::shared_ptr<Backing>& backing);

 private:
  struct Copy {
    ActorId stream;
    uint32_t tick;
    VectorClock seen;
    at::Tensor source, destination;
    ByteRange reads, writes;
    std::vector<std::shared_ptr<Backing>> held;
  };
  using Copies = std::list<Copy>;

  template <typename Needed>
  void run_where(Needed needed);
  void run_in_order(Copies::iterator copy);

  Copies pending_;
};

LateCopies& late_copies();

}  // namespace vacc
