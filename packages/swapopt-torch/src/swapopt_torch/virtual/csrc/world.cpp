#include "world.h"
#include <c10/util/Exception.h>
#include <atomic>
#include <utility>
#include "race_error.h"

namespace vacc {
namespace {

thread_local int t_device = 0;
thread_local std::vector<c10::StreamId> t_streams;
std::atomic<c10::StreamId> g_next_stream{1};

c10::StreamId& current_stream_id(int device) {
  if (t_streams.empty()) t_streams.resize(static_cast<size_t>(device_count()), 0);
  return t_streams.at(static_cast<size_t>(device));
}

}  // namespace

World& world() {
  static World* instance = new World();
  return *instance;
}

int current_device() { return t_device; }

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "Expected a device index below ",
              device_count(), ", found ", device,
              ". enable(device_count=...) sets how many virtual devices there are.");
  t_device = device;
}

int exchange_current_device(int device) {
  const int old = t_device;
  if (device >= 0) set_current_device(device);
  return old;
}

int device_count() { return static_cast<int>(world().pools.size()); }

int device_or_current(c10::Device device) { return device.has_index() ? device.index() : t_device; }

c10::Stream stream_on(int device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE,
                     c10::Device(kVirtual, static_cast<c10::DeviceIndex>(device)), id);
}

c10::Stream current_stream(int device) { return stream_on(device, current_stream_id(device)); }

c10::Stream exchange_current_stream(c10::Stream stream) {
  const int device = stream.device_index();
  const c10::Stream old = current_stream(device);
  current_stream_id(device) = stream.id();
  return old;
}

c10::Stream new_stream(int device) { return stream_on(device, g_next_stream++); }

c10::Stream pooled_stream(int device) {
  constexpr size_t kStreamsPerDevice = 32;
  struct Pool {
    std::vector<c10::Stream> streams;
    size_t taken = 0;
  };
  static auto* pools = new std::vector<Pool>(static_cast<size_t>(device_count()));
  const Locked machine;
  Pool& pool = pools->at(static_cast<size_t>(device));
  if (pool.streams.size() < kStreamsPerDevice) pool.streams.push_back(new_stream(device));
  return pool.streams.at(pool.taken++ % kStreamsPerDevice);
}

ActorId actor_of(const c10::Stream& stream) {
  return world().scheduler.actor(stream.device_index(), stream.id());
}

ActorId current_actor(int device) {
  return world().scheduler.actor(device, current_stream_id(device));
}

std::string text_of(const Race& race) {
  return race.kind + ": " + race.operation + " on " + race.stream + " is not ordered after " +
         race.earlier_operation + " on " + race.earlier_stream + ", bytes [" +
         std::to_string(race.begin) + ", " + std::to_string(race.end) + ") of " + race.memory +
         ". Order them with an event, wait_stream or a synchronisation.";
}

void World::raise_new_races() {
  if (race_mode != RaceMode::kRaise) return;
  std::string text;
  {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    if (memory.races.size() <= raised_) return;
    text = text_of(memory.races[raised_]);
    raised_ = memory.races.size();
  }
  throw RaceError(text);
}

std::vector<Race> World::take_races() {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  raised_ = 0;
  return std::exchange(memory.races, {});
}

}  // namespace vacc
