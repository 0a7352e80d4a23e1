#include "device_memory.h"
#include <c10/util/Exception.h>
#include <cstring>
#include <memory>
#include <utility>
#include "backing.h"
#include "late.h"
#include "world.h"

namespace vacc {
namespace {

struct Allocation {
  std::shared_ptr<Backing> backing;
  int device;
  CachingPool::BlockId block;
};

[[noreturn]] void fail_out_of_memory(size_t nbytes, int device) {
  CachingPool& pool = world().pool(device);
  ++pool.stats.out_of_memory;
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "virtual:", device, " is out of memory. Tried to allocate ", nbytes,
      " bytes; ", pool.active_bytes(), " of the capacity of ", pool.capacity_bytes,
      " bytes are active. Free tensors, or raise the capacity with torch.virtual.set_capacity().");
}

// When memory runs short, a caching allocator waits on the host for the streams of freed blocks.
void make_room(size_t nbytes, int device) {
  World& machine = world();
  CachingPool& pool = machine.pool(device);
  pool.settle(machine.scheduler.now_ns());
  if (pool.fits(nbytes)) return;
  ++pool.stats.retries;
  if (pool.waits_for_streams()) {
    ++pool.stats.stream_syncs;
    machine.scheduler.host_sleeps_until(pool.all_settled_at_ns());
    pool.settle(machine.scheduler.now_ns());
  }
  if (!pool.fits(nbytes)) fail_out_of_memory(nbytes, device);
}

void release_allocation(void* context) {
  const std::unique_ptr<Allocation> allocation(static_cast<Allocation*>(context));
  Locked machine;
  const auto base = reinterpret_cast<uintptr_t>(allocation->backing->data());
  const Block& block = *machine->memory.find(base);
  const int64_t now_ns = machine->scheduler.now_ns();
  int64_t reusable_at_ns = now_ns;
  for (ActorId stream : block.recorded) {
    reusable_at_ns = std::max(reusable_at_ns, machine->scheduler.at(stream).time_ns);
  }
  late_copies().on_release(block, allocation->backing);
  machine->memory.remove_device_block(base);
  CachingPool& pool = machine->pool(allocation->device);
  pool.settle(now_ns);
  pool.release(allocation->block, reusable_at_ns, now_ns);
}

template <typename MakeBacking>
c10::DataPtr allocate_with(size_t nbytes, int device, MakeBacking make_backing) {
  const c10::Device where(kVirtual, static_cast<c10::DeviceIndex>(device));
  if (nbytes == 0) return {nullptr, where};
  c10::DataPtr pointer;
  {
    Locked machine;
    make_room(nbytes, device);
    const ActorId stream = current_actor(device);
    machine->memory.check_reuse(stream);
    auto allocation = std::make_unique<Allocation>();
    allocation->backing = make_backing();
    allocation->device = device;
    allocation->block = machine->pool(device).allocate(stream, nbytes);
    void* data = allocation->backing->data();
    machine->memory.add(reinterpret_cast<uintptr_t>(data), nbytes, Place::kDevice, device, stream);
    pointer = {data, allocation.release(), &release_allocation, where};
  }
  world().raise_new_races();
  return pointer;
}

c10::CachingAllocator::Stat stat_of(const Gauge& gauge) {
  c10::CachingAllocator::Stat stat;
  stat.current = gauge.current;
  stat.peak = gauge.peak;
  stat.allocated = gauge.total_added;
  stat.freed = gauge.total_removed;
  return stat;
}

void fill(c10::CachingAllocator::StatArray& stats, const GaugeByPool& gauge) {
  for (size_t pool = 0; pool < 3; ++pool) stats[pool] = stat_of(gauge[pool]);
}

class VirtualAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    return allocate_device(nbytes, current_device());
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    if (!world().dry) std::memcpy(to, from, nbytes);
  }
  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    Locked machine;
    for (CachingPool& pool : machine->pools) {
      machine->scheduler.host_sleeps_until(pool.all_settled_at_ns());
      pool.settle(machine->scheduler.now_ns());
      pool.return_empty_segments();
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Locked machine;
    Block* block = machine->memory.find(reinterpret_cast<uintptr_t>(pointer.get()));
    const ActorId user = actor_of(stream);
    if (block != nullptr && user != block->owner) block->recorded.insert(user);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Locked machine;
    CachingPool& pool = machine->pool(device);
    pool.settle(machine->scheduler.now_ns());
    const PoolStats& from = pool.stats;
    c10::CachingDeviceAllocator::DeviceStats to;
    fill(to.allocation, from.allocations);
    fill(to.allocated_bytes, from.allocated_bytes);
    fill(to.active, from.active_blocks);
    fill(to.active_bytes, from.active_bytes);
    fill(to.segment, from.segments);
    fill(to.reserved_bytes, from.reserved_bytes);
    fill(to.requested_bytes, from.requested_bytes);
    to.num_alloc_retries = from.retries;
    to.num_ooms = from.out_of_memory;
    to.num_sync_all_streams = from.stream_syncs;
    to.num_device_alloc = from.segments_made;
    to.num_device_free = from.segments_returned;
    return to;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Locked machine;
    machine->pool(device).reset_totals();
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    Locked machine;
    CachingPool& pool = machine->pool(device);
    pool.settle(machine->scheduler.now_ns());
    pool.reset_peaks();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Locked machine;
    const CachingPool& pool = machine->pool(device);
    const size_t total =
        pool.capacity_bytes == kNoLimit ? kUnlimitedTotalBytes : pool.capacity_bytes;
    return {total - std::min(total, pool.reserved_bytes()), total};
  }

 private:
  static constexpr size_t kUnlimitedTotalBytes = size_t{1} << 40;
};

VirtualAllocator g_allocator;

}  // namespace

c10::DeviceAllocator& device_allocator() { return g_allocator; }

c10::DataPtr allocate_device(size_t nbytes, int device) {
  return allocate_with(nbytes, device,
                       [nbytes] { return Backing::allocate(nbytes, Use::kDevice); });
}

c10::DataPtr adopt_on_device(const c10::Storage& cpu_storage, int device) {
  const size_t nbytes = cpu_storage.data() == nullptr ? 0 : cpu_storage.nbytes();
  return allocate_with(nbytes, device, [&cpu_storage] { return Backing::adopt(cpu_storage); });
}

void resize_device_storage(c10::StorageImpl* storage, size_t nbytes) {
  const size_t kept = std::min(nbytes, storage->nbytes());
  if (nbytes == storage->nbytes()) return;
  const int device = storage->device().index();
  c10::DataPtr fresh = allocate_device(nbytes, device);
  if (kept > 0) {
    Locked machine;
    const ActorId stream = current_actor(device);
    const auto from = reinterpret_cast<uintptr_t>(storage->data());
    const auto to = reinterpret_cast<uintptr_t>(fresh.get());
    machine->scheduler.issue(stream, {Lane::kCompute, "resize_", static_cast<int64_t>(kept),
                                      machine->scheduler.profile.kernel_ns(2 * kept, 1)});
    late_copies().run_before({stream, {{from, kept}, {to, kept}}});
    machine->memory.access(stream, from, kept, false, "resize_");
    machine->memory.access(stream, to, kept, true, "resize_");
    if (!machine->dry) std::memcpy(fresh.get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(nbytes);
}

}  // namespace vacc
