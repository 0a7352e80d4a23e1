// What the fallback needs to know about an operator, worked out once from its schema.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

namespace vacc {

struct ArgumentInfo {
  bool writes = false;
  bool only_a_view = false;  // shares memory with a result and is not read itself
  bool is_pin_memory = false;
};

struct OperatorInfo {
  std::string name;
  std::vector<ArgumentInfo> arguments;
  bool is_list_operator = false;  // foreach and fused optimizers: work on lists of tensors
  bool draws_random_numbers = false;
  bool mixes_devices = false;  // takes CPU index tensors beside device tensors
  std::atomic<int64_t> calls{0};
};

OperatorInfo& operator_info(const c10::OperatorHandle& op);
OperatorInfo& operator_info(const std::string& name);  // for kernels outside the fallback

// Names, as torch::Library::impl takes them, of the aten operators that `chosen` picks.
std::vector<std::string> aten_operators(
    const std::function<bool(const c10::OperatorHandle&)>& chosen);

std::unordered_map<std::string, int64_t> operator_counts();
void clear_operator_counts();

}  // namespace vacc
