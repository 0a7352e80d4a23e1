#include "pinned_memory.h"
#include <c10/util/Exception.h>
#include <cstring>
#include <memory>
#include "backing.h"
#include "host_access.h"
#include "late.h"
#include "world.h"

namespace vacc {
namespace {

void check_limit(size_t nbytes) {
  const HostLedger& host = world().host;
  TORCH_CHECK(host.fits(nbytes), "Cannot pin ", nbytes,
              " more bytes of host memory: ", host.allocated.current,
              " bytes of pinned host memory are allocated and ", host.registered.current,
              " registered, and the limit is ", host.limit_bytes,
              " bytes. Free pinned tensors, or raise the limit with "
              "swapopt_torch.virtual.set_pinned_limit().");
}

struct PinnedBlock {
  std::shared_ptr<Backing> backing;
};

void release_pinned(void* context) {
  const std::unique_ptr<PinnedBlock> pinned(static_cast<PinnedBlock*>(context));
  Locked machine;
  const auto base = reinterpret_cast<uintptr_t>(pinned->backing->data());
  late_copies().on_release(*machine->memory.find(base), pinned->backing);
  machine->memory.remove_host_block(base, "free of a pinned tensor");
  machine->host.remove_pinned(pinned->backing->nbytes());
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    watch_host_operators();
    Locked machine;
    check_limit(HostLedger::rounded(nbytes));
    auto pinned = std::make_unique<PinnedBlock>(PinnedBlock{Backing::allocate(nbytes, Use::kHost)});
    void* data = pinned->backing->data();
    machine->memory.add(reinterpret_cast<uintptr_t>(data), nbytes, Place::kPinned, -1, kHost);
    machine->host.add_pinned(nbytes);
    return {data, pinned.release(), &release_pinned, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }

  bool record_event(void* address, void*, c10::Stream stream) override {
    Locked machine;
    Block* block = machine->memory.find(reinterpret_cast<uintptr_t>(address));
    if (block == nullptr || block->place != Place::kPinned) return false;
    block->recorded.insert(actor_of(stream));
    return true;
  }
  void empty_cache() override {}  // freed blocks are not kept
  at::HostStats get_stats() override {
    Locked machine;
    at::HostStats stats;
    stats.allocated_bytes.current = machine->host.allocated.current;
    stats.allocated_bytes.peak = machine->host.allocated.peak;
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override { Locked()->host.reset_peaks(); }
};

PinnedAllocator g_pinned_allocator;

}  // namespace

at::HostAllocator& pinned_allocator() { return g_pinned_allocator; }

c10::DeleterFnPtr pinned_deleter() { return &release_pinned; }

bool is_pinned(const void* address, size_t nbytes) {
  Locked machine;
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const Block* block = machine->memory.find(begin);
  return block != nullptr && block->place != Place::kDevice && block->holds(begin, nbytes);
}

void register_host(uintptr_t address, size_t nbytes) {
  watch_host_operators();
  Locked machine;
  TORCH_CHECK(address != 0 && nbytes > 0,
              "host_register: expected a non-null address and a positive size, found address ",
              address, " and ", nbytes, " bytes. Pass tensor.data_ptr() and its size in bytes.");
  TORCH_CHECK(!machine->memory.overlaps(address, nbytes),
              "host_register: part of the range is already pinned or registered. "
              "Register each region once, and unregister it before registering it anew.");
  check_limit(nbytes);
  machine->memory.add(address, nbytes, Place::kRegistered, -1, kHost);
  machine->host.add_registered(nbytes);
}

void unregister_host(uintptr_t address) {
  {
    Locked machine;
    const Block* block = machine->memory.find(address);
    TORCH_CHECK(block != nullptr && block->base == address && block->place == Place::kRegistered,
                "host_unregister: expected the start address of a registered region, found ",
                address, ". Pass the address that was given to host_register.");
    late_copies().on_release(*block, nullptr);
    machine->host.remove_registered(block->nbytes);
    machine->memory.remove_host_block(address, "host_unregister");
  }
  world().raise_new_races();
}

}  // namespace vacc
