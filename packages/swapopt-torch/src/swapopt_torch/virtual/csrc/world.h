// The one simulated machine of this process, and the lock that guards it.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <mutex>
#include <vector>
#include "core/caching_pool.h"
#include "core/host_ledger.h"
#include "core/scheduler.h"
#include "core/shadow_memory.h"

namespace vacc {

constexpr auto kVirtual = c10::DeviceType::PrivateUse1;

enum class RaceMode { kOff, kCollect, kRaise };

struct World {
  std::recursive_mutex mutex;
  Scheduler scheduler;
  ShadowMemory memory{scheduler};
  std::vector<CachingPool> pools;
  HostLedger host;
  RaceMode race_mode = RaceMode::kRaise;
  bool dry = false;  // addresses and time, but no bytes and no values; fixed at the start

  CachingPool& pool(int device) { return pools.at(static_cast<size_t>(device)); }

  // In raise mode: throws the first race found since the last call. Called outside the lock.
  void raise_new_races();
  std::vector<Race> take_races();

 private:
  size_t raised_ = 0;
};

World& world();  // never destroyed: tensors may outlive static destructors

class Locked {
 public:
  Locked() : guard_(world().mutex) {}
  World* operator->() { return &world(); }
  World& operator*() { return world(); }

 private:
  std::lock_guard<std::recursive_mutex> guard_;
};

// Current device and stream: per host thread, as on every accelerator.
int current_device();
void set_current_device(int device);
int exchange_current_device(int device);
int device_count();
int device_or_current(c10::Device device);
c10::Stream stream_on(int device, c10::StreamId id);
c10::Stream current_stream(int device);
c10::Stream exchange_current_stream(c10::Stream stream);
c10::Stream new_stream(int device);
// One of a few that are handed out in turn.
c10::Stream pooled_stream(int device);
ActorId actor_of(const c10::Stream& stream);
ActorId current_actor(int device);

std::string text_of(const Race& race);

}  // namespace vacc
