// What the Python side of the package sees.
#include <ATen/Context.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/utils/pybind.h>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>
#include "collectives/bind.h"
#include "device_hooks.h"
#include "device_memory.h"
#include "generator.h"
#include "host_access.h"
#include "late.h"
#include "operator_info.h"
#include "pinned_memory.h"
#include "race_error.h"
#include "world.h"

namespace vacc {
namespace {

namespace py = pybind11;
PyObject* g_race_error = nullptr;

using Figures = std::unordered_map<std::string, double>;

Profile profile_of(const Figures& figures) {
  const auto ns = [&figures](const char* name) { return std::llround(figures.at(name)); };
  return {.h2d_bytes_per_ns = figures.at("h2d_bytes_per_ns"),
          .d2h_bytes_per_ns = figures.at("d2h_bytes_per_ns"),
          .memory_bytes_per_ns = figures.at("memory_bytes_per_ns"),
          .interconnect_bytes_per_ns = figures.at("interconnect_bytes_per_ns"),
          .full_duplex = figures.at("full_duplex") != 0,
          .list_launch_per_tensor = figures.at("list_launch_per_tensor") != 0,
          .host_issue_ns = ns("host_issue_ns"),
          .copy_overhead_ns = ns("copy_overhead_ns"),
          .kernel_overhead_ns = ns("kernel_overhead_ns"),
          .interconnect_latency_ns = ns("interconnect_latency_ns"),
          .sync_ns = ns("sync_ns"),
          .poll_ns = ns("poll_ns")};
}

size_t limit_of(std::optional<int64_t> nbytes) {
  return nbytes ? static_cast<size_t>(*nbytes) : kNoLimit;
}

void bind_configuration(py::module_& m) {
  m.def("start", [](int device_count, bool dry, py::object race_error) {
    g_race_error = race_error.release().ptr();
    world().pools.resize(static_cast<size_t>(device_count));
    world().scheduler.set_device_count(device_count);
    world().dry = dry;
    c10::SetAllocator(kVirtual, &device_allocator());
    install_hooks();
    at::setHostAllocator(kVirtual, &pinned_allocator());
    // Until a device type is initialised torch calls no pointer pinned.
    at::globalContext().lazyInitDevice(kVirtual);
  });
  m.def("set_profile",
        [](const Figures& figures) { Locked()->scheduler.profile = profile_of(figures); });
  m.def("set_race_mode", [](int mode) {
    Locked machine;
    machine->race_mode = static_cast<RaceMode>(mode);
    machine->memory.detect = machine->race_mode != RaceMode::kOff;
  });
  m.def("is_dry", [] { return world().dry; });
  m.def("set_late_copies", [](bool on) {
    Locked machine;
    late_copies().run_all();
    late_copies().enabled = on;
  });
  m.def("set_timeline", [](bool on) { Locked()->scheduler.timeline_on = on; });
}

void bind_devices(py::module_& m) {
  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("default_generator", &default_generator);
}

void bind_memory(py::module_& m) {
  m.def("set_capacity", [](int device, std::optional<int64_t> nbytes) {
    Locked()->pool(device).capacity_bytes = limit_of(nbytes);
  });
  m.def("set_pinned_limit",
        [](std::optional<int64_t> nbytes) { Locked()->host.limit_bytes = limit_of(nbytes); });
  m.def("host_register", &register_host);
  m.def("host_unregister", &unregister_host);
  m.def("host_memory", [] {
    Locked machine;
    const HostLedger& host = machine->host;
    return std::make_tuple(host.requested.current, host.allocated.current, host.registered.current,
                           host.requested.peak, host.allocated.peak, host.registered.peak);
  });
  m.def("reset_host_peaks", [] { Locked()->host.reset_peaks(); });
}

void bind_observation(py::module_& m) {
  m.def("take_races", [] {
    std::vector<std::tuple<std::string, std::string, std::string, std::string, std::string,
                           std::string, int64_t, int64_t, std::string>>
        rows;
    for (const Race& race : world().take_races()) {
      rows.emplace_back(race.kind, race.operation, race.stream, race.earlier_operation,
                        race.earlier_stream, race.memory, race.begin, race.end, text_of(race));
    }
    return rows;
  });
  m.def("timeline", [] {
    std::vector<std::tuple<int, int64_t, const char*, const char*, int64_t, int64_t, int64_t>> rows;
    for (const TimelineRow& row : Locked()->scheduler.timeline()) {
      rows.emplace_back(row.device, row.stream, kLaneNames[static_cast<size_t>(row.lane)],
                        row.operation, row.nbytes, row.start_ns, row.end_ns);
    }
    return rows;
  });
  m.def("clear_timeline", [] { Locked()->scheduler.clear_timeline(); });
  m.def("now_ns", [] { return Locked()->scheduler.now_ns(); });
  m.def("advance_host", [](int64_t ns) { Locked()->scheduler.advance_host(ns); });
  m.def("reset_clock", [] {
    Locked machine;
    machine->scheduler.reset_clock();
    for (CachingPool& pool : machine->pools) pool.forget_times();
  });
  m.def("operator_counts", &operator_counts);
  m.def("clear_operator_counts", &clear_operator_counts);
  m.def("host_access", [](const at::Tensor& tensor, bool write) {
    record_host_access(tensor, write, write ? "host write" : "host read");
    world().raise_new_races();
  });
}

}  // namespace

PyObject* RaceError::python_type() { return g_race_error; }

}  // namespace vacc

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  vacc::bind_configuration(m);
  vacc::bind_devices(m);
  vacc::bind_memory(m);
  vacc::bind_observation(m);
  vacc::bind_collectives(m);
}
