#include "operator_info.h"
#include <memory>
#include <mutex>
#include <set>

namespace vacc {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<const c10::FunctionSchema*, OperatorInfo*> by_schema;
  std::unordered_map<std::string, std::unique_ptr<OperatorInfo>> by_name;
};

Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

OperatorInfo& named(Registry& all, const std::string& name) {
  auto& slot = all.by_name[name];
  if (!slot) {
    slot = std::make_unique<OperatorInfo>();
    slot->name = name;
  }
  return *slot;
}

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

bool accepts_cpu_indices(const std::string& name) {
  static const std::set<std::string> names{"aten::index.Tensor",     "aten::index.Tensor_out",
                                           "aten::index_put",        "aten::index_put_",
                                           "aten::_index_put_impl_", "aten::_unsafe_index.Tensor",
                                           "aten::_unsafe_index_put"};
  return names.count(name) > 0;
}

ArgumentInfo describe(const c10::Argument& argument) {
  ArgumentInfo info;
  info.is_pin_memory = argument.name() == "pin_memory";
  const c10::AliasInfo* alias = argument.alias_info();
  if (alias == nullptr) return info;
  const auto& elements = alias->containedTypes();
  info.writes = alias->isWrite() || (!elements.empty() && elements[0].isWrite());
  info.only_a_view = !info.writes;
  return info;
}

void fill(OperatorInfo& info, const c10::OperatorHandle& op) {
  for (const c10::Argument& argument : op.schema().arguments())
    info.arguments.push_back(describe(argument));
  const std::string& base = op.operator_name().name;
  info.is_list_operator =
      base.find("foreach") != std::string::npos || base.rfind("aten::_fused_", 0) == 0;
  info.draws_random_numbers = op.hasTag(at::Tag::nondeterministic_seeded);
  info.mixes_devices = accepts_cpu_indices(info.name);
}

}  // namespace

OperatorInfo& operator_info(const c10::OperatorHandle& op) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> guard(all.mutex);
  OperatorInfo*& slot = all.by_schema[&op.schema()];
  if (slot == nullptr) {
    slot = &named(all, full_name(op.operator_name()));
    fill(*slot, op);
  }
  return *slot;
}

OperatorInfo& operator_info(const std::string& name) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> guard(all.mutex);
  return named(all, name);
}

std::vector<std::string> aten_operators(
    const std::function<bool(const c10::OperatorHandle&)>& chosen) {
  constexpr size_t kPrefix = 6;  // "aten::"
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<std::string> names;
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (op && chosen(*op)) names.push_back(full_name(name).substr(kPrefix));
  }
  return names;
}

std::unordered_map<std::string, int64_t> operator_counts() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> guard(all.mutex);
  std::unordered_map<std::string, int64_t> counts;
  for (const auto& [name, info] : all.by_name) {
    if (info->calls > 0) counts[name] = info->calls;
  }
  return counts;
}

void clear_operator_counts() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> guard(all.mutex);
  for (auto& [name, info] : all.by_name) info->calls = 0;
}

}  // namespace vacc
