// Device memory as torch sees it: the allocator of the virtual device.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

namespace vacc {

// All of these allocate on the current stream of `device` and throw OutOfMemoryError beyond
// capacity.
c10::DataPtr allocate_device(size_t nbytes, int device);
c10::DataPtr adopt_on_device(const c10::Storage& cpu_storage, int device);

// Releases, allocates or reallocates (keeping the common prefix) on the current stream.
void resize_device_storage(c10::StorageImpl* storage, size_t nbytes);

c10::DeviceAllocator& device_allocator();

}  // namespace vacc
