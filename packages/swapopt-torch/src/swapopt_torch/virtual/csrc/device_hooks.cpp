// The two doors through which torch reaches a device: hooks and the device guard.
#include "device_hooks.h"
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include "collectives/transfer.h"
#include "device_memory.h"
#include "generator.h"
#include "host_waits.h"
#include "pinned_memory.h"
#include "world.h"

namespace vacc {
namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_current_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address, 1); }

  at::Device getDeviceFromPtr(void* address) const override {
    Locked machine;
    const Block* block = machine->memory.find(reinterpret_cast<uintptr_t>(address));
    TORCH_CHECK(block != nullptr && block->place == Place::kDevice,
                "Expected an address in virtual device memory, found ", address);
    return {kVirtual, static_cast<c10::DeviceIndex>(block->device)};
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_device_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

EventState& state_of(void* event) { return *static_cast<EventState*>(event); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kVirtual; }
  c10::Device getDevice() const override {
    return {kVirtual, static_cast<c10::DeviceIndex>(current_device())};
  }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < device_count()) set_current_device(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device_or_current(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_on(device_or_current(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(device_or_current(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return pooled_stream(device_or_current(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_current_stream(stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    Locked machine;
    if (*event == nullptr) *event = new EventState();
    machine->scheduler.record(actor_of(stream), state_of(*event));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    Locked machine;
    machine->scheduler.wait(actor_of(stream), state_of(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr,
                "elapsed_time: both events must have been recorded.");
    constexpr double kMillisecondsPerNanosecond = 1e-6;
    return static_cast<double>(Locked()->scheduler.elapsed_ns(state_of(from), state_of(to))) *
           kMillisecondsPerNanosecond;
  }

  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    return host_asks([event](Scheduler& scheduler) { return scheduler.poll_event(state_of(event)); });
  }
  bool queryStream(const c10::Stream& stream) const override {
    return host_asks(
        [&stream](Scheduler& scheduler) { return scheduler.poll_stream(actor_of(stream)); });
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    host_waits([event](Scheduler& scheduler) { scheduler.host_waits_for(state_of(event)); });
  }
  void synchronizeStream(const c10::Stream& stream) const override { wait_on_host_for(stream); }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    transfers_in_flight().settle_device(device);
    host_waits([device](Scheduler& scheduler) { scheduler.host_waits_for_device(device); });
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    device_allocator().recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

void install_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }

void wait_on_host_for(const c10::Stream& stream) {
  host_waits(
      [&stream](Scheduler& scheduler) { scheduler.host_waits_for_stream(actor_of(stream)); });
}

}  // namespace vacc
