#include "late.h"
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include "cpu_alias.h"
#include "world.h"

namespace vacc {
namespace {

void poison(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) {
    std::memset(tensor.mutable_data_ptr(), kPoison, tensor.nbytes());
  } else if (tensor.is_floating_point() || tensor.is_complex()) {
    tensor.fill_(std::numeric_limits<double>::quiet_NaN());
  } else {
    tensor.fill_(-1);
  }
}

}  // namespace

LateCopies& late_copies() {
  static auto* instance = new LateCopies();
  return *instance;
}

void LateCopies::defer(ActorId stream, const at::Tensor& source, const at::Tensor& destination) {
  const VectorClock& seen = world().scheduler.seen_by(stream);
  const CpuKernelScope scope;
  poison(destination);
  pending_.push_back({stream,
                      seen.at(stream),
                      seen,
                      source,
                      destination,
                      byte_range(source),
                      byte_range(destination),
                      {}});
}

template <typename Needed>
void LateCopies::run_where(Needed needed) {
  for (auto copy = pending_.begin(); copy != pending_.end();) {
    if (needed(*copy)) {
      run_in_order(copy);
      copy = pending_.begin();
    } else {
      ++copy;
    }
  }
}

void LateCopies::run_before(const Toucher& toucher) {
  if (pending_.empty()) return;
  const VectorClock& seen = world().scheduler.seen_by(toucher.actor);
  run_where([&](const Copy& copy) {
    return seen.covers(copy.stream, copy.tick) &&
           std::any_of(toucher.ranges.begin(), toucher.ranges.end(), [&](const ByteRange& range) {
             return range.overlaps(copy.reads) || range.overlaps(copy.writes);
           });
  });
}

// The host can read pinned memory behind our back: whatever it has waited for must be there.
void LateCopies::run_before_host() {
  if (pending_.empty()) return;
  const VectorClock& seen = world().scheduler.seen_by(kHost);
  run_where([&](const Copy& copy) { return seen.covers(copy.stream, copy.tick); });
}

void LateCopies::run_all() {
  run_where([](const Copy&) { return true; });
}

// Runs the copies that this one is ordered after and that touch the same bytes, then itself.
void LateCopies::run_in_order(Copies::iterator copy) {
  const Copy self = *copy;
  pending_.erase(copy);
  for (auto earlier = pending_.begin(); earlier != pending_.end();) {
    const bool conflicts = earlier->writes.overlaps(self.reads) ||
                           earlier->writes.overlaps(self.writes) ||
                           earlier->reads.overlaps(self.writes);
    const bool before = self.seen.covers(earlier->stream, earlier->tick);
    if (conflicts && before) {
      run_in_order(earlier);
      earlier = pending_.begin();
    } else {
      ++earlier;
    }
  }
  const CpuKernelScope scope;
  self.destination.copy_(self.source);
}

void LateCopies::on_release(const Block& block, const std::shared_ptr<Backing>& backing) {
  if (pending_.empty()) return;
  const VectorClock over = world().memory.seen_at_release(block);
  const ByteRange range{block.base, block.nbytes};
  for (auto copy = pending_.begin(); copy != pending_.end();) {
    const bool touches = range.overlaps(copy->reads) || range.overlaps(copy->writes);
    if (touches && backing != nullptr && over.covers(copy->stream, copy->tick))
      copy->held.push_back(backing);
    const bool lost = touches && (backing == nullptr || !over.covers(copy->stream, copy->tick));
    copy = lost ? pending_.erase(copy) : std::next(copy);
  }
}

}  // namespace vacc
