// Tests of the headers under csrc/core, which know nothing of torch.
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>
#include "core/caching_pool.h"
#include "core/engine.h"
#include "core/host_ledger.h"
#include "core/ring.h"
#include "core/scheduler.h"
#include "core/shadow_memory.h"
#include "core/vector_clock.h"

namespace {

using namespace vacc;

struct Test {
  const char* name;
  std::function<void()> run;
};
std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
struct Registered {
  Registered(const char* name, std::function<void()> run) {
    tests().push_back({name, std::move(run)});
  }
};
int g_failures = 0;

template <typename A, typename B>
void expect_equal(const A& found, const B& expected, const char* what, int line) {
  if (found == static_cast<A>(expected)) return;
  ++g_failures;
  std::printf("  line %d: %s is %s, expected %s\n", line, what, std::to_string(found).c_str(),
              std::to_string(expected).c_str());
}

#define TEST(name)                                  \
  void name();                                      \
  const Registered registered_##name(#name, &name); \
  void name()
#define EXPECT_EQ(found, expected) expect_equal((found), (expected), #found, __LINE__)

// ---------------------------------------------------------------- vector clocks and engines

TEST(clock_covers_what_it_joined) {
  VectorClock a, b;
  a.tick(3);
  a.tick(3);
  EXPECT_EQ(b.covers(3, 1), false);
  b.join(a);
  EXPECT_EQ(b.covers(3, 2), true);
  EXPECT_EQ(b.covers(3, 3), false);
  EXPECT_EQ(b.at(100), 0);
}

TEST(engine_serves_one_at_a_time_and_fills_gaps) {
  Engine engine;
  EXPECT_EQ(engine.book(0, 10, 0), 0);
  EXPECT_EQ(engine.book(5, 10, 0), 10);
  EXPECT_EQ(engine.book(100, 10, 0), 100);
  EXPECT_EQ(engine.book(0, 50, 0), 20);
  EXPECT_EQ(engine.book(0, 40, 0), 110);
  EXPECT_EQ(engine.book(0, 30, 0), 70);
}

TEST(engine_bookings_never_overlap) {
  std::mt19937 random(1);
  Engine engine;
  std::vector<std::pair<int64_t, int64_t>> booked;
  for (int i = 0; i < 500; ++i) {
    const int64_t ready = random() % 2000, duration = 1 + random() % 30;
    const int64_t start = engine.book(ready, duration, 0);
    EXPECT_EQ(start >= ready, true);
    for (const auto& [from, to] : booked) EXPECT_EQ(start + duration <= from || to <= start, true);
    booked.emplace_back(start, start + duration);
  }
}

// ---------------------------------------------------------------- scheduler

struct Machine {
  Scheduler scheduler;
  ShadowMemory memory{scheduler};
  Machine() {
    scheduler.set_device_count(2);
    scheduler.profile = {.h2d_bytes_per_ns = 10.0,
                         .d2h_bytes_per_ns = 5.0,
                         .memory_bytes_per_ns = 100.0,
                         .interconnect_bytes_per_ns = 2.0,
                         .host_issue_ns = 100,
                         .copy_overhead_ns = 20,
                         .interconnect_latency_ns = 7,
                         .poll_ns = 10};
  }
  ActorId stream(int64_t id, int device = 0) { return scheduler.actor(device, id); }
  void kernel(ActorId id, int64_t ns) { scheduler.issue(id, {Lane::kCompute, "kernel", 0, ns}); }
  void copy(ActorId id, Lane lane, size_t nbytes) {
    scheduler.issue(
        id, {lane, "copy", static_cast<int64_t>(nbytes), scheduler.profile.copy_ns(lane, nbytes)});
  }
  void order(ActorId first, ActorId second) {
    EventState event;
    scheduler.record(first, event);
    scheduler.wait(second, event);
  }
};

TEST(host_pays_for_every_issue_and_streams_run_behind_it) {
  Machine m;
  const ActorId a = m.stream(0);
  m.kernel(a, 1000);
  m.kernel(a, 1000);
  EXPECT_EQ(m.scheduler.now_ns(), 200);
  EXPECT_EQ(m.scheduler.at(a).time_ns, 2100);
  m.scheduler.host_waits_for_stream(a);
  EXPECT_EQ(m.scheduler.now_ns(), 2100);
}

TEST(copies_overlap_kernels_and_each_other_when_full_duplex) {
  Machine m;
  const ActorId a = m.stream(0), in = m.stream(1), out = m.stream(2);
  m.kernel(a, 5000);
  m.copy(in, Lane::kH2D, 10000);
  m.copy(out, Lane::kD2H, 10000);
  EXPECT_EQ(m.scheduler.at(in).time_ns, 200 + 20 + 1000);
  EXPECT_EQ(m.scheduler.at(out).time_ns, 300 + 20 + 2000);
}

TEST(half_duplex_copies_take_turns) {
  Machine m;
  m.scheduler.profile.full_duplex = false;
  const ActorId in = m.stream(1), out = m.stream(2);
  m.copy(in, Lane::kH2D, 10000);
  m.copy(out, Lane::kD2H, 10000);
  EXPECT_EQ(m.scheduler.at(in).time_ns, 1120);
  EXPECT_EQ(m.scheduler.at(out).time_ns, 1120 + 2020);
}

TEST(several_launches_end_after_the_last_is_issued) {
  Machine m;
  const ActorId a = m.stream(0);
  m.scheduler.issue(a, {Lane::kCompute, "list", 0, 50, 5});
  EXPECT_EQ(m.scheduler.now_ns(), 500);
  EXPECT_EQ(m.scheduler.at(a).time_ns, 510);
}

TEST(event_carries_time_and_order) {
  Machine m;
  const ActorId a = m.stream(0), b = m.stream(1);
  m.kernel(a, 1000);
  EventState event;
  m.scheduler.record(a, event);
  m.kernel(a, 1000);
  m.scheduler.wait(b, event);
  EXPECT_EQ(m.scheduler.at(b).time_ns, 1100);
  EXPECT_EQ(m.scheduler.seen_by(b).at(a), 1);
}

// ---------------------------------------------------------------- transfers between processes

struct Transfers : Machine {
  ActorId compute = stream(0), link = stream(1);
  Departure depart() { return scheduler.depart(link, compute); }
  void arrive(Departure& departure, int64_t ready_ns, int64_t duration_ns) {
    scheduler.arrive(link, departure.done, {Lane::kCollective, "transfer", 8, duration_ns},
                     ready_ns);
  }
};

TEST(a_transfer_is_ready_after_the_callers_stream) {
  Transfers m;
  m.kernel(m.compute, 1000);
  const Departure departure = m.depart();
  EXPECT_EQ(m.scheduler.now_ns(), 200);
  EXPECT_EQ(departure.ready_ns, 1100);
  EXPECT_EQ(m.scheduler.seen_by(m.link).at(m.compute), 1);
}

TEST(a_transfer_of_an_idle_stream_is_ready_once_issued) {
  Transfers m;
  EXPECT_EQ(m.depart().ready_ns, 100);
}

TEST(a_transfer_begins_with_the_last_process_and_after_the_one_before) {
  Transfers m;
  Departure first = m.depart(), second = m.depart(), third = m.depart();
  m.arrive(first, 5000, 100);
  m.arrive(second, 300, 50);
  m.arrive(third, 9000, 1);
  EXPECT_EQ(first.done.time_ns, 5100);
  EXPECT_EQ(second.done.time_ns, 5150);
  EXPECT_EQ(third.done.time_ns, 9001);
  EXPECT_EQ(m.scheduler.timeline().back().start_ns, 9000);
  EXPECT_EQ(m.scheduler.timeline().size(), 3u);
}

TEST(who_waits_for_a_transfer_is_ordered_after_it_and_not_after_later_ones) {
  Transfers m;
  Departure first = m.depart(), second = m.depart();
  m.arrive(first, 400, 100);
  m.arrive(second, 400, 100);
  m.scheduler.wait(m.compute, first.done);
  EXPECT_EQ(m.scheduler.at(m.compute).time_ns, 500);
  EXPECT_EQ(m.scheduler.seen_by(m.compute).at(m.link), 1);
}

TEST(a_transfer_from_before_a_reset_of_the_clock_is_over) {
  Transfers m;
  Departure departure = m.depart();
  m.scheduler.reset_clock();
  m.arrive(departure, 5000, 100);
  m.scheduler.wait(m.compute, departure.done);
  EXPECT_EQ(m.scheduler.at(m.compute).time_ns, 0);
  EXPECT_EQ(m.scheduler.at(m.link).time_ns, 0);
}

TEST(bytes_over_the_interconnect_by_the_ring_formulas) {
  EXPECT_EQ(ring_pass_nbytes(1000, 4), 750u);
  EXPECT_EQ(ring_all_reduce_nbytes(1000, 4), 1500u);
  EXPECT_EQ(chain_nbytes(1000, 4), 1000u);
  EXPECT_EQ(ring_pass_nbytes(1000, 1) + ring_all_reduce_nbytes(1000, 1) + chain_nbytes(1000, 1), 0u);
  const Transfers m;
  EXPECT_EQ(m.scheduler.profile.interconnect_ns(1000), 507);
}

TEST(poll_succeeds_when_time_has_come) {
  Machine m;
  const ActorId a = m.stream(0);
  m.kernel(a, 35);
  EventState event;
  m.scheduler.record(a, event);
  int polls = 1;
  while (!m.scheduler.poll_event(event)) ++polls;
  EXPECT_EQ(polls, 4);
  EXPECT_EQ(m.scheduler.seen_by(kHost).at(a), 1);
}

TEST(events_from_before_a_reset_are_over) {
  Machine m;
  const ActorId a = m.stream(0);
  m.kernel(a, 1'000'000);
  EventState event;
  m.scheduler.record(a, event);
  m.scheduler.reset_clock();
  EXPECT_EQ(m.scheduler.poll_event(event), true);
  m.scheduler.wait(a, event);
  m.kernel(a, 10);
  EXPECT_EQ(m.scheduler.at(a).time_ns, 10 + 100 + 10);
}

TEST(timeline_has_a_row_for_everything_that_takes_time) {
  Machine m;
  const ActorId a = m.stream(0, 1);
  m.kernel(a, 1000);
  m.scheduler.host_waits_for_device(1);
  m.scheduler.host_waits_for_device(1);
  const auto rows = m.scheduler.timeline();
  EXPECT_EQ(rows.size(), 2);
  EXPECT_EQ(rows[0].device, 1);
  EXPECT_EQ(rows[0].end_ns - rows[0].start_ns, 1000);
  EXPECT_EQ(rows[1].device, -1);
  EXPECT_EQ(rows[1].end_ns, 1100);
}

// ---------------------------------------------------------------- race detector

constexpr uintptr_t kBase = 4096;

struct Watched : Machine {
  ActorId a = stream(0), b = stream(1);
  Block& block = memory.add(kBase, 1000, Place::kDevice, 0, a);

  Watched() { order(a, b); }
  void touch(ActorId id, size_t begin, size_t length, bool write) {
    kernel(id, 1);
    memory.access(id, kBase + begin, length, write, "kernel");
  }
  size_t races() const { return memory.races.size(); }
};

TEST(reads_never_race_with_reads) {
  Watched m;
  m.touch(m.a, 0, 1000, false);
  m.touch(m.b, 0, 1000, false);
  EXPECT_EQ(m.races(), 0);
}

TEST(disjoint_bytes_do_not_race) {
  Watched m;
  m.touch(m.a, 0, 500, true);
  m.touch(m.b, 500, 500, true);
  EXPECT_EQ(m.races(), 0);
  m.touch(m.b, 499, 1, false);
  EXPECT_EQ(m.races(), 1);
  EXPECT_EQ(m.memory.races[0].begin, 499);
}

TEST(write_after_unordered_read_is_a_race) {
  Watched m;
  m.touch(m.b, 100, 10, false);
  m.touch(m.a, 0, 1000, true);
  EXPECT_EQ(m.races(), 1);
  EXPECT_EQ(m.memory.races[0].kind == "write after read", true);
  EXPECT_EQ(m.memory.races[0].begin, 100);
}

TEST(an_event_orders_and_so_does_the_host) {
  Watched m;
  m.touch(m.a, 0, 1000, true);
  m.order(m.a, m.b);
  m.touch(m.b, 0, 1000, true);
  m.scheduler.host_waits_for_stream(m.b);
  m.touch(m.a, 0, 1000, true);
  EXPECT_EQ(m.races(), 0);
}

TEST(waiting_for_a_device_is_waiting_for_all_that_its_streams_waited_for) {
  Machine m;
  m.memory.add(kBase, 100, Place::kRegistered, -1, kHost);
  const ActorId elsewhere = m.stream(0, 1), here = m.stream(0, 0);
  m.kernel(here, 1);
  m.scheduler.host_waits_for_device(0);
  m.kernel(elsewhere, 1);
  m.memory.access(elsewhere, kBase, 100, true, "kernel");
  m.order(elsewhere, here);  // and nothing more is issued here
  m.scheduler.host_waits_for_device(0);
  m.memory.access(kHost, kBase, 100, false, "host");
  EXPECT_EQ(m.memory.races.size(), 0);
}

TEST(order_is_transitive) {
  Watched m;
  const ActorId c = m.stream(2);
  m.touch(m.a, 0, 1000, true);
  m.order(m.a, m.b);
  m.order(m.b, c);
  m.touch(c, 0, 1000, false);
  EXPECT_EQ(m.races(), 0);
}

TEST(allocation_is_a_write_by_its_stream) {
  Machine m;
  const ActorId a = m.stream(0), b = m.stream(1);
  EventState before;
  m.scheduler.record(a, before);
  m.memory.add(kBase, 100, Place::kDevice, 0, a);
  m.scheduler.wait(b, before);
  m.kernel(b, 1);
  m.memory.access(b, kBase, 100, true, "kernel");
  EXPECT_EQ(m.memory.races.size(), 1);
  EXPECT_EQ(m.memory.races[0].earlier_operation == "allocation", true);
}

TEST(memory_freed_in_use_races_when_its_stream_allocates_again) {
  for (const bool recorded : {false, true}) {
    Watched m;
    m.touch(m.b, 0, 10, false);
    if (recorded) m.block.recorded.insert(m.b);
    m.memory.remove_device_block(kBase);
    EXPECT_EQ(m.races(), 0);
    m.memory.check_reuse(m.b);
    EXPECT_EQ(m.races(), 0);
    m.memory.check_reuse(m.a);
    EXPECT_EQ(m.races(), recorded ? 0 : 1);
  }
}

TEST(waiting_between_free_and_reuse_is_in_time) {
  Watched m;
  m.touch(m.b, 0, 10, false);
  m.memory.remove_device_block(kBase);
  m.order(m.b, m.a);
  m.memory.check_reuse(m.a);
  EXPECT_EQ(m.races(), 0);
}

TEST(releasing_host_memory_in_flight_is_a_race_at_once) {
  for (const bool waited : {false, true}) {
    Machine m;
    m.memory.add(kBase, 100, Place::kRegistered, -1, kHost);
    const ActorId a = m.stream(0);
    m.copy(a, Lane::kD2H, 100);
    m.memory.access(a, kBase, 100, true, "copy");
    if (waited) m.scheduler.host_waits_for_stream(a);
    m.memory.remove_host_block(kBase, "unregister");
    EXPECT_EQ(m.memory.races.size(), waited ? 0 : 1);
  }
}

TEST(blocks_are_found_by_any_address_inside) {
  Machine m;
  m.memory.add(kBase, 100, Place::kRegistered, -1, kHost);
  EXPECT_EQ(m.memory.find(kBase - 1) == nullptr, true);
  EXPECT_EQ(m.memory.find(kBase + 99) != nullptr, true);
  EXPECT_EQ(m.memory.find(kBase + 100) == nullptr, true);
  EXPECT_EQ(m.memory.overlaps(kBase - 50, 50), false);
  EXPECT_EQ(m.memory.overlaps(kBase - 50, 51), true);
  EXPECT_EQ(m.memory.overlaps(kBase + 100, 5), false);
}

// Against the definition, byte by byte: a race if some earlier conflicting access is not ordered.
TEST(detector_agrees_with_the_definition_on_random_programs) {
  struct Seen {
    ActorId actor;
    uint32_t tick;
    size_t begin, end;
    bool write;
  };
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    Machine m;
    std::vector<ActorId> streams{m.stream(0), m.stream(1), m.stream(2)};
    m.memory.add(kBase, 64, Place::kPinned, -1, kHost);
    std::vector<Seen> history;
    for (int step = 0; step < 40; ++step) {
      const ActorId one = streams[random() % 3], other = streams[random() % 3];
      if (random() % 3 == 0) {
        m.order(one, other);
        continue;
      }
      m.kernel(one, 1);
      const size_t begin = random() % 64, end = begin + 1 + random() % (64 - begin);
      const bool write = random() % 2 == 0;
      const VectorClock& seen = m.scheduler.seen_by(one);
      bool expected = false;
      for (const Seen& earlier : history) {
        const bool conflict =
            (write || earlier.write) && begin < earlier.end && earlier.begin < end;
        expected = expected || (conflict && !seen.covers(earlier.actor, earlier.tick));
      }
      const size_t before = m.memory.races.size();
      m.memory.access(one, kBase + begin, end - begin, write, "kernel");
      const bool found = m.memory.races.size() > before;
      EXPECT_EQ(found, expected);
      if (expected) break;  // after a race the detector may forget what the definition remembers
      history.push_back({one, seen.at(one), begin, end, write});
    }
  }
}

// ---------------------------------------------------------------- the caching allocator's books

int64_t now(const Gauge& gauge) { return gauge.current; }

TEST(blocks_are_rounded_to_512_bytes) {
  CachingPool pool;
  pool.allocate(0, 1);
  pool.allocate(0, 512);
  pool.allocate(0, 513);
  EXPECT_EQ(now(pool.stats.allocated_bytes[0]), 512 + 512 + 1024);
  EXPECT_EQ(now(pool.stats.requested_bytes[0]), 1 + 512 + 513);
  EXPECT_EQ(now(pool.stats.reserved_bytes[0]), kSmallSegmentBytes);
}

TEST(segments_by_size) {
  CachingPool pool;
  pool.allocate(0, kSmallLimitBytes + 1);
  EXPECT_EQ(now(pool.stats.reserved_bytes[2]), kLargeSegmentBytes);
  pool.allocate(0, (30 << 20) + 1);
  EXPECT_EQ(now(pool.stats.reserved_bytes[2]), kLargeSegmentBytes + (32 << 20));
  EXPECT_EQ(now(pool.stats.reserved_bytes[1]), 0);
}

TEST(free_memory_is_reused_by_its_stream_only) {
  CachingPool pool;
  pool.release(pool.allocate(1, 1000), 0, 0);
  pool.allocate(1, 1000);
  EXPECT_EQ(now(pool.stats.segments[0]), 1);
  pool.allocate(2, 1000);
  EXPECT_EQ(now(pool.stats.segments[0]), 2);
}

TEST(neighbouring_holes_merge) {
  CachingPool pool;
  std::vector<CachingPool::BlockId> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(pool.allocate(0, 512 << 10));
  EXPECT_EQ(now(pool.stats.segments[0]), 1);
  for (const int i : {0, 2, 1, 3}) pool.release(blocks[static_cast<size_t>(i)], 0, 0);
  pool.return_empty_segments();
  EXPECT_EQ(pool.reserved_bytes(), 0);
}

TEST(a_block_in_use_by_a_stream_stays_active_until_its_time) {
  CachingPool pool;
  const auto block = pool.allocate(0, 512);
  pool.release(block, 100, 50);
  EXPECT_EQ(now(pool.stats.allocated_bytes[0]), 0);
  EXPECT_EQ(pool.active_bytes(), 512);
  pool.settle(99);
  EXPECT_EQ(pool.active_bytes(), 512);
  EXPECT_EQ(pool.all_settled_at_ns(), 100);
  pool.settle(100);
  EXPECT_EQ(pool.active_bytes(), 0);
  EXPECT_EQ(pool.stats.active_bytes[0].peak, 512);
}

TEST(capacity_counts_active_bytes_and_empty_segments_are_returned) {
  CachingPool pool;
  pool.capacity_bytes = 3 << 20;
  pool.release(pool.allocate(0, 512), 0, 0);
  EXPECT_EQ(pool.fits(3 << 20), true);
  EXPECT_EQ(pool.fits((3 << 20) + 1), false);
  pool.allocate(1, 1024);
  EXPECT_EQ(pool.reserved_bytes(), kSmallSegmentBytes);
  EXPECT_EQ(pool.stats.segments_returned, 1);
}

TEST(books_balance_on_random_programs) {
  std::mt19937 random(7);
  CachingPool pool;
  std::vector<std::pair<CachingPool::BlockId, size_t>> live;
  int64_t expected = 0, peak = 0;
  for (int step = 0; step < 3000; ++step) {
    if (live.empty() || random() % 2 == 0) {
      const size_t nbytes = 1 + random() % (random() % 4 == 0 ? 30u << 20 : 5000u);
      live.emplace_back(pool.allocate(static_cast<ActorId>(random() % 3), nbytes),
                        CachingPool::rounded(nbytes));
      expected += static_cast<int64_t>(live.back().second);
      peak = std::max(peak, expected);
    } else {
      const size_t i = random() % live.size();
      pool.release(live[i].first, 0, 0);
      expected -= static_cast<int64_t>(live[i].second);
      live.erase(live.begin() + static_cast<long>(i));
    }
    EXPECT_EQ(now(pool.stats.active_bytes[0]), expected);
    EXPECT_EQ(pool.reserved_bytes() >= pool.active_bytes(), true);
  }
  EXPECT_EQ(pool.stats.active_bytes[0].peak, peak);
  for (const auto& [block, size] : live) pool.release(block, 0, 0);
  pool.return_empty_segments();
  EXPECT_EQ(pool.reserved_bytes(), 0);
}

TEST(pinned_memory_is_rounded_to_powers_of_two_and_registered_memory_is_not) {
  HostLedger host;
  host.add_pinned(1000);
  host.add_pinned(4096);
  host.add_registered(1000);
  EXPECT_EQ(now(host.requested), 5096);
  EXPECT_EQ(now(host.allocated), 1024 + 4096);
  EXPECT_EQ(now(host.registered), 1000);
  host.remove_pinned(4096);
  EXPECT_EQ(now(host.allocated), 1024);
  EXPECT_EQ(host.allocated.peak, 5120);
}

}  // namespace

int main() {
  int failed_tests = 0;
  for (const Test& test : tests()) {
    const int before = g_failures;
    test.run();
    const bool failed = g_failures > before;
    failed_tests += failed ? 1 : 0;
    std::printf("%s %s\n", failed ? "FAILED" : "ok    ", test.name);
  }
  return failed_tests == 0 ? 0 : 1;
}
