// A resource that does one thing at a time: the compute units, or a copy engine.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>

namespace vacc {

class Engine {
 public:
  // Books `duration_ns` at the first gap that starts at or after `ready_ns`; returns the start.
  // Nothing is ever booked before `horizon_ns` again, so older bookings are forgotten.
  int64_t book(int64_t ready_ns, int64_t duration_ns, int64_t horizon_ns) {
    forget_before(horizon_ns);
    int64_t start = ready_ns;
    auto next = busy_.upper_bound(start);
    if (next != busy_.begin()) start = std::max(start, std::prev(next)->second);
    while (next != busy_.end() && next->first < start + duration_ns) {
      start = std::max(start, next->second);
      ++next;
    }
    if (duration_ns > 0) insert(start, start + duration_ns, next);
    return start;
  }

  void clear() { busy_.clear(); }

 private:
  using Bookings = std::map<int64_t, int64_t>;  // start -> end, disjoint

  void insert(int64_t start, int64_t end, Bookings::iterator next) {
    if (next != busy_.begin() && std::prev(next)->second == start) {
      std::prev(next)->second = end;
    } else {
      busy_.emplace(start, end);
    }
  }

  void forget_before(int64_t horizon_ns) {
    while (!busy_.empty() && busy_.begin()->second <= horizon_ns) busy_.erase(busy_.begin());
  }

  Bookings busy_;
};

}  // namespace vacc
