// Every block of device and pinned memory, and who last read and wrote each byte range of it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>
#include "scheduler.h"

namespace vacc {

struct Access {
  ActorId actor = -1;
  uint32_t tick = 0;
  const char* operation = "";
  bool exists() const { return actor >= 0; }
};

struct Race {
  std::string kind;
  std::string operation;
  std::string stream;
  std::string earlier_operation;
  std::string earlier_stream;
  std::string memory;
  int64_t begin;
  int64_t end;
};

enum class Place { kDevice, kPinned, kRegistered };

struct Span {  // the key in the map is its first byte
  size_t end;
  Access write;
  std::vector<Access> reads;
};

struct Block {
  uintptr_t base;
  size_t nbytes;
  Place place;
  int device;
  ActorId owner;               // the stream that allocated it; the host for pinned memory
  std::set<ActorId> recorded;  // streams whose work the allocator waits for before reuse
  std::map<size_t, Span> spans;

  bool holds(uintptr_t address, size_t length) const {
    return address >= base && address + length <= base + nbytes;
  }
};

class ShadowMemory {
 public:
  explicit ShadowMemory(Scheduler& scheduler) : scheduler_(scheduler) {}

  bool detect = true;
  std::vector<Race> races;

  Block& add(uintptr_t base, size_t nbytes, Place place, int device, ActorId owner) {
    Block block{base, nbytes, place, device, owner, {}, {}};
    if (place == Place::kDevice) {
      const uint32_t tick = scheduler_.mark_allocation(owner);
      if (detect) block.spans.emplace(0, Span{nbytes, {owner, tick, "allocation"}, {}});
    }
    return blocks_.insert_or_assign(base, std::move(block)).first->second;
  }

  Block* find(uintptr_t address) {
    auto entry = blocks_.upper_bound(address);
    if (entry == blocks_.begin()) return nullptr;
    --entry;
    return entry->second.holds(address, 1) ? &entry->second : nullptr;
  }

  bool overlaps(uintptr_t base, size_t nbytes) const {
    auto next = blocks_.lower_bound(base + nbytes);
    if (next == blocks_.begin()) return false;
    const Block& last = std::prev(next)->second;
    return last.base + last.nbytes > base;
  }

  void access(ActorId actor, uintptr_t address, size_t length, bool write, const char* operation) {
    if (!detect || length == 0) return;
    Block* block = find(address);
    if (block == nullptr) return;
    const size_t begin = address - block->base;
    const size_t end = std::min(begin + length, block->nbytes);
    const Access me{actor, scheduler_.seen_by(actor).at(actor), operation};
    if (write) {
      access_for_write(*block, begin, end, me);
    } else {
      access_for_read(*block, begin, end, me);
    }
  }

  // A caching allocator may hand memory freed on a stream to the next allocation on that stream.
  void check_reuse(ActorId owner) {
    auto entry = freed_in_use_.find(owner);
    if (entry == freed_in_use_.end()) return;
    VectorClock seen = scheduler_.seen_by(owner);
    seen.join(scheduler_.seen_by(kHost));
    for (const FreedInUse& freed : entry->second) {
      const Access* use = first_unordered(freed.uses, seen);
      if (use == nullptr) continue;
      report("reuse of memory freed while in use", {owner, 0, "allocation"}, *use, freed.memory, 0,
             freed.nbytes);
    }
    freed_in_use_.erase(entry);
  }

  void remove_device_block(uintptr_t base) {
    Block& block = blocks_.at(base);
    if (detect) {
      std::vector<Access> uses = unordered_uses(block, seen_at_release(block));
      if (!uses.empty())
        freed_in_use_[block.owner].push_back({std::move(uses), block.nbytes, name_of(block)});
    }
    blocks_.erase(base);
  }

  void remove_host_block(uintptr_t base, const char* operation) {
    Block& block = blocks_.at(base);
    if (detect) {
      const std::vector<Access> uses = unordered_uses(block, seen_at_release(block));
      if (!uses.empty())
        report("pinned memory released while in use", {kHost, 0, operation}, uses.front(),
               name_of(block), 0, block.nbytes);
    }
    blocks_.erase(base);
  }

  // What is certain to be over before the memory of `block` may be used for something else.
  VectorClock seen_at_release(const Block& block) const {
    VectorClock seen = scheduler_.seen_by(block.owner);
    seen.join(scheduler_.seen_by(kHost));
    for (ActorId stream : block.recorded) seen.join(scheduler_.seen_by(stream));
    return seen;
  }

 private:
  struct FreedInUse {
    std::vector<Access> uses;
    size_t nbytes;
    std::string memory;
  };

  static bool ordered(const Access& access, const VectorClock& seen) {
    return !access.exists() || seen.covers(access.actor, access.tick);
  }

  static const Access* first_unordered(const std::vector<Access>& uses, const VectorClock& seen) {
    for (const Access& use : uses) {
      if (!ordered(use, seen)) return &use;
    }
    return nullptr;
  }

  static void split(std::map<size_t, Span>& spans, size_t at) {
    auto entry = spans.upper_bound(at);
    if (entry == spans.begin()) return;
    --entry;
    if (entry->first == at || at >= entry->second.end) return;
    Span tail = entry->second;
    entry->second.end = at;
    spans.emplace_hint(std::next(entry), at, std::move(tail));
  }

  // Calls `visit(first_byte, span)` for spans that tile [begin, end) exactly.
  template <typename Visit>
  static void tile(Block& block, size_t begin, size_t end, Visit visit) {
    auto& spans = block.spans;
    split(spans, begin);
    split(spans, end);
    auto entry = spans.lower_bound(begin);
    for (size_t at = begin; at < end; at = entry->second.end, ++entry) {
      if (entry == spans.end() || entry->first > at) {
        const size_t gap_end = entry == spans.end() ? end : std::min(end, entry->first);
        entry = spans.emplace_hint(entry, at, Span{gap_end, {}, {}});
      }
      visit(at, entry->second);
    }
  }

  void access_for_read(Block& block, size_t begin, size_t end, const Access& me) {
    const VectorClock& seen = scheduler_.seen_by(me.actor);
    bool reported = false;
    tile(block, begin, end, [&](size_t at, Span& span) {
      if (!reported && !ordered(span.write, seen)) {
        reported = true;
        report("read after write", me, span.write, name_of(block), at, span.end);
      }
      for (Access& read : span.reads) {
        if (read.actor == me.actor) {
          read = me;
          return;
        }
      }
      span.reads.push_back(me);
    });
  }

  void access_for_write(Block& block, size_t begin, size_t end, const Access& me) {
    const VectorClock& seen = scheduler_.seen_by(me.actor);
    bool reported = false;
    auto check = [&](const char* kind, const Access& earlier, size_t at, size_t stop) {
      if (reported || ordered(earlier, seen)) return;
      reported = true;
      report(kind, me, earlier, name_of(block), at, stop);
    };
    tile(block, begin, end, [&](size_t at, Span& span) {
      check("write after write", span.write, at, span.end);
      for (const Access& read : span.reads) check("write after read", read, at, span.end);
    });
    auto first = block.spans.find(begin);
    first->second = {end, me, {}};
    block.spans.erase(std::next(first), block.spans.lower_bound(end));
  }

  static std::vector<Access> unordered_uses(const Block& block, const VectorClock& seen) {
    std::vector<Access> uses;
    for (const auto& [begin, span] : block.spans) {
      if (!ordered(span.write, seen)) uses.push_back(span.write);
      for (const Access& read : span.reads) {
        if (!ordered(read, seen)) uses.push_back(read);
      }
    }
    return uses;
  }

  static std::string name_of(const Block& block) {
    const std::string size = std::to_string(block.nbytes) + " bytes of ";
    if (block.place == Place::kDevice)
      return size + "virtual:" + std::to_string(block.device) + " memory";
    return size + (block.place == Place::kPinned ? "pinned host memory" : "registered host memory");
  }

  void report(const char* kind, const Access& me, const Access& earlier, const std::string& memory,
              size_t begin, size_t end) {
    if (races.size() >= kMaxRaces) return;
    races.push_back({kind, me.operation, scheduler_.at(me.actor).label, earlier.operation,
                     scheduler_.at(earlier.actor).label, memory, static_cast<int64_t>(begin),
                     static_cast<int64_t>(end)});
  }

  static constexpr size_t kMaxRaces = 10'000;

  Scheduler& scheduler_;
  std::map<uintptr_t, Block> blocks_;
  std::unordered_map<ActorId, std::vector<FreedInUse>> freed_in_use_;
};

}  // namespace vacc
