// What an actor (the host or a stream) knows to have happened before it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace vacc {

using ActorId = int;
constexpr ActorId kHost = 0;

class VectorClock {
 public:
  uint32_t at(ActorId actor) const {
    const auto index = static_cast<size_t>(actor);
    return index < ticks_.size() ? ticks_[index] : 0;
  }

  void tick(ActorId actor) {
    const auto index = static_cast<size_t>(actor);
    if (ticks_.size() <= index) ticks_.resize(index + 1, 0);
    ++ticks_[index];
  }

  void join(const VectorClock& other) {
    if (ticks_.size() < other.ticks_.size()) ticks_.resize(other.ticks_.size(), 0);
    for (size_t i = 0; i < other.ticks_.size(); ++i)
      ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
  }

  bool covers(ActorId actor, uint32_t tick) const { return at(actor) >= tick; }

 private:
  std::vector<uint32_t> ticks_;
};

}  // namespace vacc
