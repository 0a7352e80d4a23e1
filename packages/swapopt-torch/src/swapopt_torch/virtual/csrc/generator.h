// Random numbers of the device: the CPU's engine, with a state of its own per device.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <optional>

namespace vacc {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
at::Generator cpu_generator_inside(const at::Generator& generator);

// While it lives, CPU kernels that ask for the default CPU generator draw from the device's.
class DeviceRandomScope {
 public:
  explicit DeviceRandomScope(int device);
  ~DeviceRandomScope();
  DeviceRandomScope(const DeviceRandomScope&) = delete;
  DeviceRandomScope& operator=(const DeviceRandomScope&) = delete;

 private:
  at::CPUGeneratorImpl* cpu_;
  at::CPUGeneratorImpl* device_;
};

}  // namespace vacc
