// What the host does to pinned memory with CPU operators.
#pragma once
#include <ATen/core/Tensor.h>

namespace vacc {

// CPU kernels that run on behalf of the device are not accesses by the host.
class InsideDeviceWork {
 public:
  InsideDeviceWork();
  ~InsideDeviceWork();
  InsideDeviceWork(const InsideDeviceWork&) = delete;
  InsideDeviceWork& operator=(const InsideDeviceWork&) = delete;
};

// Starts to observe CPU operators; the first call installs the observer.
void watch_host_operators();

void record_host_access(const at::Tensor& tensor, bool write, const char* operation);

}  // namespace vacc
