// Virtual time and order: the host, the streams, their engines, events, and the timeline.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>
#include "engine.h"
#include "profile.h"
#include "vector_clock.h"

namespace vacc {

struct Actor {
  std::string label;
  int device = -1;
  int64_t stream = 0;
  VectorClock seen;
  int64_t time_ns = 0;  // host: now; stream: when its last work ends
};

struct EventState {
  VectorClock seen;
  int64_t time_ns = 0;
  bool recorded = false;
  int clock = 0;  // which run of the clock `time_ns` belongs to
};

struct TimelineRow {
  int device;
  int64_t stream;
  Lane lane;
  const char* operation;
  int64_t nbytes;
  int64_t start_ns;
  int64_t end_ns;
};

struct Work {
  Lane lane;
  const char* operation;
  int64_t nbytes;
  int64_t duration_ns;
  int64_t launches = 1;
};

// Work that other processes take part in: ordered when it is issued, timed when they are known.
struct Departure {
  EventState done;
  int64_t ready_ns;  // when this process alone could begin it
};

class Scheduler {
 public:
  Profile profile;
  bool timeline_on = true;

  void set_device_count(int count) { engines_.resize(static_cast<size_t>(count)); }

  ActorId actor(int device, int64_t stream) {
    const auto [entry, is_new] =
        ids_.try_emplace({device, stream}, static_cast<int>(actors_.size()));
    if (is_new) actors_.push_back({label_of(device, stream), device, stream, {}, 0});
    return entry->second;
  }

  // What the stream serves, for messages that name it.
  void describe(ActorId id, const std::string& purpose) {
    mutable_at(id).label += " (" + purpose + ")";
  }

  const Actor& at(ActorId id) const { return actors_[static_cast<size_t>(id)]; }
  const VectorClock& seen_by(ActorId id) const { return at(id).seen; }
  int64_t now_ns() const { return actors_[kHost].time_ns; }
  void advance_host(int64_t ns) { host().time_ns += ns; }
  void host_acted() { host().seen.tick(kHost); }

  // The host hands work to a stream: it runs after everything the stream and the host have seen.
  void issue(ActorId id, const Work& work) {
    order_next(id);
    book(id, work);
  }

  // The two halves of `issue`, for work whose cost is known only after it was done.
  void order_next(ActorId id) {
    host_acted();
    follow_host(id);
    mutable_at(id).seen.tick(id);
  }

  void book(ActorId id, const Work& work) {
    Actor& stream = mutable_at(id);
    const int64_t issued_from_ns = now_ns();
    const int64_t ready_ns = std::max(stream.time_ns, issued_from_ns + profile.host_issue_ns);
    host().time_ns += profile.host_issue_ns * work.launches;
    const int64_t duration_ns = stretch_over_launches(work);
    const int64_t start_ns =
        engine(stream.device, work.lane).book(ready_ns, duration_ns, issued_from_ns);
    stream.time_ns = start_ns + duration_ns;
    add_row({stream.device, stream.stream, work.lane, work.operation, work.nbytes, start_ns,
             stream.time_ns});
  }

  // The two halves of such work on the stream `id`, which first waits for the stream `after`.
  Departure depart(ActorId id, ActorId after) {
    follow_host(after);
    mutable_at(id).seen.join(at(after).seen);
    order_next(id);
    host().time_ns += profile.host_issue_ns;
    const int64_t ready_ns = std::max(at(after).time_ns, now_ns());
    return {{at(id).seen, ready_ns, true, clock_}, ready_ns};
  }

  // `ready_ns`: when all processes could begin. Work that the clock was reset after is over.
  void arrive(ActorId id, EventState& done, const Work& work, int64_t ready_ns) {
    if (done.clock != clock_) return;
    Actor& stream = mutable_at(id);
    const int64_t start_ns = std::max(stream.time_ns, ready_ns);
    stream.time_ns = done.time_ns = start_ns + work.duration_ns;
    add_row({stream.device, stream.stream, work.lane, work.operation, work.nbytes, start_ns,
             stream.time_ns});
  }

  // An allocation costs no time but is a point of its own in the stream's order.
  uint32_t mark_allocation(ActorId id) {
    Actor& stream = mutable_at(id);
    follow_host(id);
    stream.seen.tick(id);
    return stream.seen.at(id);
  }

  void record(ActorId id, EventState& event) {
    follow_host(id);
    event = {at(id).seen, std::max(at(id).time_ns, now_ns()), true, clock_};
  }

  void wait(ActorId id, const EventState& event) {
    follow_host(id);
    if (!event.recorded) return;
    Actor& stream = mutable_at(id);
    stream.seen.join(event.seen);
    stream.seen.tick(id);
    stream.time_ns = std::max(stream.time_ns, time_of(event));
  }

  void host_waits_for(const EventState& event) {
    if (event.recorded) host_joins(event.seen, time_of(event), "synchronize event");
  }

  void host_waits_for_stream(ActorId id) {
    const Actor& stream = at(id);
    host_joins(stream.seen, stream.time_ns, "synchronize stream");
  }

  void host_waits_for_device(int device) {
    VectorClock seen = seen_by(kHost);
    int64_t time_ns = 0;
    for (size_t i = 0; i < actors_.size(); ++i) {
      const Actor& actor = actors_[i];
      if (actor.device != device) continue;
      time_ns = std::max(time_ns, actor.time_ns);
      // Whoever knows of a stream's last tick knows all that the stream knows.
      const auto id = static_cast<ActorId>(i);
      if (!seen.covers(id, actor.seen.at(id))) seen.join(actor.seen);
    }
    host_joins(seen, time_ns, "synchronize device");
  }

  // The memory allocator waits for time to pass; that orders nothing the program may rely on.
  void host_sleeps_until(int64_t time_ns) { host().time_ns = std::max(host().time_ns, time_ns); }

  bool poll_event(const EventState& event) {
    return !event.recorded || poll(event.seen, time_of(event));
  }
  bool poll_stream(ActorId id) { return poll(at(id).seen, at(id).time_ns); }

  int64_t elapsed_ns(const EventState& from, const EventState& to) const {
    return time_of(to) - time_of(from);
  }

  void reset_clock() {
    ++clock_;
    for (Actor& actor : actors_) actor.time_ns = 0;
    for (auto& engines : engines_) {
      for (Engine& engine : engines) engine.clear();
    }
  }

  std::vector<TimelineRow> timeline() const { return {rows_.begin(), rows_.end()}; }
  void clear_timeline() { rows_.clear(); }

 private:
  static constexpr size_t kMaxRows = 2'000'000;

  // What was recorded before the clock was reset is long over.
  int64_t time_of(const EventState& event) const {
    return event.clock == clock_ ? event.time_ns : 0;
  }

  bool poll(const VectorClock& seen, int64_t time_ns) {
    host().time_ns += profile.poll_ns;
    if (now_ns() < time_ns) return false;
    host().seen.join(seen);
    host_acted();
    return true;
  }

  Actor& mutable_at(ActorId id) { return actors_[static_cast<size_t>(id)]; }
  Actor& host() { return actors_[kHost]; }
  void follow_host(ActorId id) { mutable_at(id).seen.join(host().seen); }

  Engine& engine(int device, Lane lane) {
    auto& engines = engines_[static_cast<size_t>(device)];
    const bool shared = lane == Lane::kD2H && !profile.full_duplex;
    return engines[static_cast<size_t>(shared ? Lane::kH2D : lane)];
  }

  // With several launches the device cannot finish before the host has issued the last one.
  int64_t stretch_over_launches(const Work& work) const {
    if (work.launches <= 1) return work.duration_ns;
    const int64_t issued_ns = (work.launches - 1) * profile.host_issue_ns;
    return std::max(work.duration_ns, issued_ns + work.duration_ns / work.launches);
  }

  void host_joins(const VectorClock& seen, int64_t time_ns, const char* operation) {
    const int64_t start_ns = now_ns();
    host().time_ns = std::max(start_ns, time_ns) + profile.sync_ns;
    host().seen.join(seen);
    host_acted();
    if (now_ns() > start_ns) add_row({-1, 0, Lane::kHost, operation, 0, start_ns, now_ns()});
  }

  void add_row(const TimelineRow& row) {
    if (!timeline_on) return;
    if (rows_.size() == kMaxRows) rows_.pop_front();
    rows_.push_back(row);
  }

  static std::string label_of(int device, int64_t stream) {
    const std::string name = "virtual:" + std::to_string(device);
    return stream == 0 ? name + " default stream" : name + " stream " + std::to_string(stream);
  }

  std::deque<Actor> actors_{Actor{"host", -2, 0, {}, 0}};
  std::map<std::pair<int, int64_t>, ActorId> ids_;
  std::vector<std::array<Engine, 3>> engines_;
  std::deque<TimelineRow> rows_;
  int clock_ = 0;
};

}  // namespace vacc
