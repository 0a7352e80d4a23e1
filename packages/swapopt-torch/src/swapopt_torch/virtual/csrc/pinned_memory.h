// Pinned host memory: the allocator, and regions of other memory that the program registers.
#pragma once
#include <ATen/core/CachingHostAllocator.h>
#include <cstddef>
#include <cstdint>

namespace vacc {

at::HostAllocator& pinned_allocator();
c10::DeleterFnPtr
pinned_deleter();  // tells storages of that allocator from other views of its memory
bool is_pinned(const void* address, size_t nbytes);
void register_host(uintptr_t address, size_t nbytes);
void unregister_host(uintptr_t address);

}  // namespace vacc
