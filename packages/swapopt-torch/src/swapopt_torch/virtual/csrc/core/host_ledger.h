// The books of pinned host memory.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include "caching_pool.h"

namespace vacc {

class HostLedger {
 public:
  size_t limit_bytes = kNoLimit;
  Gauge requested, allocated, registered;

  // The pinned allocator of the frameworks rounds every request up to a power of two.
  static size_t rounded(size_t nbytes) { return std::bit_ceil(nbytes); }

  bool fits(size_t nbytes) const {
    const auto held = static_cast<size_t>(allocated.current + registered.current);
    return limit_bytes == kNoLimit || held + nbytes <= limit_bytes;
  }

  void add_pinned(size_t nbytes) {
    requested.add(static_cast<int64_t>(nbytes));
    allocated.add(static_cast<int64_t>(rounded(nbytes)));
  }
  void remove_pinned(size_t nbytes) {
    requested.remove(static_cast<int64_t>(nbytes));
    allocated.remove(static_cast<int64_t>(rounded(nbytes)));
  }
  void add_registered(size_t nbytes) { registered.add(static_cast<int64_t>(nbytes)); }
  void remove_registered(size_t nbytes) { registered.remove(static_cast<int64_t>(nbytes)); }

  void reset_peaks() {
    requested.reset_peak();
    allocated.reset_peak();
    registered.reset_peak();
  }
};

}  // namespace vacc
