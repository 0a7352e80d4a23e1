// The books of a caching allocator on one device: segments, free lists per stream, statistics.
// It hands out no memory; the real bytes live on the CPU heap and are the torch side's business.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <list>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>
#include "vector_clock.h"

namespace vacc {

constexpr size_t kBlockBytes = 512;           // every block is a multiple of this
constexpr size_t kSmallLimitBytes = 1 << 20;  // larger requests use the large pool
constexpr size_t kSmallSegmentBytes = 2 << 20;
constexpr size_t kLargeSegmentBytes = 20 << 20;
constexpr size_t kOwnSegmentBytes = 10
                                    << 20;  // requests from here on get a segment of their own size
constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();

struct Gauge {
  int64_t current = 0, peak = 0, total_added = 0, total_removed = 0;

  void add(int64_t amount) {
    current += amount;
    total_added += amount;
    peak = std::max(peak, current);
  }
  void remove(int64_t amount) {
    current -= amount;
    total_removed += amount;
  }
  void reset_peak() { peak = current; }
  void reset_totals() { total_added = total_removed = 0; }
};

class GaugeByPool {  // 0: both pools, 1: small, 2: large
 public:
  void add(bool small, size_t amount) {
    gauges_[0].add(static_cast<int64_t>(amount));
    gauges_[small ? 1 : 2].add(static_cast<int64_t>(amount));
  }
  void remove(bool small, size_t amount) {
    gauges_[0].remove(static_cast<int64_t>(amount));
    gauges_[small ? 1 : 2].remove(static_cast<int64_t>(amount));
  }
  void reset_peak() {
    for (Gauge& gauge : gauges_) gauge.reset_peak();
  }
  void reset_totals() {
    for (Gauge& gauge : gauges_) gauge.reset_totals();
  }
  const Gauge& operator[](size_t pool) const { return gauges_[pool]; }

 private:
  std::array<Gauge, 3> gauges_;
};

struct PoolStats {
  GaugeByPool allocations, allocated_bytes, active_blocks, active_bytes, segments, reserved_bytes,
      requested_bytes;
  int64_t retries = 0, out_of_memory = 0, stream_syncs = 0, segments_made = 0,
          segments_returned = 0;

  std::array<GaugeByPool*, 7> gauges() {
    return {&allocations, &allocated_bytes, &active_blocks,  &active_bytes,
            &segments,    &reserved_bytes,  &requested_bytes};
  }
};

class CachingPool {
 public:
  using BlockId = int64_t;

  size_t capacity_bytes = kNoLimit;
  PoolStats stats;

  static size_t rounded(size_t nbytes) {
    return std::max(kBlockBytes, (nbytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes);
  }

  size_t active_bytes() const { return static_cast<size_t>(stats.active_bytes[0].current); }
  size_t reserved_bytes() const { return static_cast<size_t>(stats.reserved_bytes[0].current); }
  bool fits(size_t nbytes) const {
    return capacity_bytes == kNoLimit || active_bytes() + rounded(nbytes) <= capacity_bytes;
  }
  bool waits_for_streams() const { return !waiting_.empty(); }
  int64_t all_settled_at_ns() const { return waiting_.empty() ? 0 : waiting_.rbegin()->first; }

  BlockId allocate(ActorId stream, size_t nbytes) {
    const size_t size = rounded(nbytes);
    const bool small = size <= kSmallLimitBytes;
    Hole hole = best_hole(stream, small, size);
    take(hole, size);
    const BlockId id = next_id_++;
    blocks_.emplace(id, Taken{hole.segment, hole.offset, size, nbytes});
    stats.allocations.add(small, 1);
    stats.allocated_bytes.add(small, size);
    stats.requested_bytes.add(small, nbytes);
    stats.active_blocks.add(small, 1);
    stats.active_bytes.add(small, size);
    return id;
  }

  // The block stays active until the virtual host time reaches `reusable_at_ns`.
  void release(BlockId id, int64_t reusable_at_ns, int64_t now_ns) {
    const Taken& block = blocks_.at(id);
    const bool small = block.segment->small;
    stats.allocations.remove(small, 1);
    stats.allocated_bytes.remove(small, block.size);
    stats.requested_bytes.remove(small, block.requested);
    if (reusable_at_ns > now_ns) {
      waiting_.emplace(reusable_at_ns, id);
    } else {
      give_back(id);
    }
  }

  void settle(int64_t now_ns) {
    while (!waiting_.empty() && waiting_.begin()->first <= now_ns) {
      const BlockId id = waiting_.begin()->second;
      waiting_.erase(waiting_.begin());
      give_back(id);
    }
  }

  void return_empty_segments() {
    for (auto segment = segments_.begin(); segment != segments_.end();) {
      const auto hole = segment->holes.find(0);
      const bool empty = hole != segment->holes.end() && hole->second == segment->size;
      if (empty) {
        stats.segments.remove(segment->small, 1);
        stats.reserved_bytes.remove(segment->small, segment->size);
        ++stats.segments_returned;
        segment = segments_.erase(segment);
      } else {
        ++segment;
      }
    }
  }

  void reset_peaks() {
    for (GaugeByPool* gauge : stats.gauges()) gauge->reset_peak();
  }
  void reset_totals() {
    for (GaugeByPool* gauge : stats.gauges()) gauge->reset_totals();
    stats.retries = stats.out_of_memory = stats.stream_syncs = stats.segments_made =
        stats.segments_returned = 0;
  }
  void forget_times() {  // the virtual clock starts again at zero: all recorded work is over
    settle(std::numeric_limits<int64_t>::max());
  }

 private:
  struct Segment {
    ActorId stream;
    bool small;
    size_t size;
    std::map<size_t, size_t> holes;  // offset -> length, never adjacent
  };
  using SegmentRef = std::list<Segment>::iterator;
  struct Taken {
    SegmentRef segment;
    size_t offset, size, requested;
  };
  struct Hole {
    SegmentRef segment;
    size_t offset, size;
  };

  static size_t segment_size(size_t size, bool small) {
    if (small) return kSmallSegmentBytes;
    if (size < kOwnSegmentBytes) return kLargeSegmentBytes;
    return (size + kSmallSegmentBytes - 1) / kSmallSegmentBytes * kSmallSegmentBytes;
  }

  Hole best_hole(ActorId stream, bool small, size_t size) {
    std::optional<Hole> best;
    for (auto segment = segments_.begin(); segment != segments_.end(); ++segment) {
      if (segment->stream != stream || segment->small != small) continue;
      for (const auto& [offset, length] : segment->holes) {
        if (length >= size && (!best || length < best->size)) best = Hole{segment, offset, length};
      }
    }
    return best ? *best : hole_in_new_segment(stream, small, size);
  }

  Hole hole_in_new_segment(ActorId stream, bool small, size_t size) {
    const size_t length = segment_size(size, small);
    if (capacity_bytes != kNoLimit && reserved_bytes() + length > capacity_bytes) {
      ++stats.retries;
      return_empty_segments();
    }
    segments_.push_front({stream, small, length, {{0, length}}});
    stats.segments.add(small, 1);
    stats.reserved_bytes.add(small, length);
    ++stats.segments_made;
    return {segments_.begin(), 0, length};
  }

  static void take(const Hole& hole, size_t size) {
    auto& holes = hole.segment->holes;
    holes.erase(hole.offset);
    if (hole.size > size) holes.emplace(hole.offset + size, hole.size - size);
  }

  void give_back(BlockId id) {
    const Taken block = blocks_.at(id);
    blocks_.erase(id);
    auto& holes = block.segment->holes;
    auto hole = holes.emplace(block.offset, block.size).first;
    const auto after = std::next(hole);
    if (after != holes.end() && after->first == hole->first + hole->second) {
      hole->second += after->second;
      holes.erase(after);
    }
    if (hole != holes.begin()) {
      const auto before = std::prev(hole);
      if (before->first + before->second == hole->first) {
        before->second += hole->second;
        holes.erase(hole);
      }
    }
    stats.active_blocks.remove(block.segment->small, 1);
    stats.active_bytes.remove(block.segment->small, block.size);
  }

  std::list<Segment> segments_;
  std::unordered_map<BlockId, Taken> blocks_;
  std::multimap<int64_t, BlockId> waiting_;
  BlockId next_id_ = 1;
};

}  // namespace vacc
