// What things cost on the modelled accelerator. The figures and their sources live in profiles.py.
#pragma once
#include <cstddef>
#include <cstdint>

namespace vacc {

enum class Lane { kCompute = 0, kH2D = 1, kD2H = 2, kHost = 3, kCollective = 4 };
constexpr const char* kLaneNames[] = {"compute", "h2d", "d2h", "host", "collective"};

struct Profile {
  double h2d_bytes_per_ns = 53.0;
  double d2h_bytes_per_ns = 53.0;
  double memory_bytes_per_ns = 4300.0;
  double interconnect_bytes_per_ns = 450.0;
  bool full_duplex = true;
  bool list_launch_per_tensor = false;
  int64_t host_issue_ns = 4000;
  int64_t copy_overhead_ns = 2000;
  int64_t kernel_overhead_ns = 0;
  int64_t interconnect_latency_ns = 10000;
  int64_t sync_ns = 0;
  int64_t poll_ns = 1000;

  int64_t copy_ns(Lane lane, size_t nbytes) const {
    const double rate = lane == Lane::kH2D ? h2d_bytes_per_ns : d2h_bytes_per_ns;
    return copy_overhead_ns + static_cast<int64_t>(static_cast<double>(nbytes) / rate);
  }

  int64_t kernel_ns(size_t traffic_bytes, int64_t launches) const {
    return launches * kernel_overhead_ns +
           static_cast<int64_t>(static_cast<double>(traffic_bytes) / memory_bytes_per_ns);
  }

  int64_t interconnect_ns(size_t sent_bytes) const {
    return interconnect_latency_ns +
           static_cast<int64_t>(static_cast<double>(sent_bytes) / interconnect_bytes_per_ns);
  }
};

}  // namespace vacc
