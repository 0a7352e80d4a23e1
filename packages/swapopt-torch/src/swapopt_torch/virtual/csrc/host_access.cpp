#include "host_access.h"
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <mutex>
#include <string>
#include <unordered_map>
#include "pinned_memory.h"
#include "tensor_access.h"
#include "world.h"

namespace vacc {
namespace {

thread_local int t_device_work_depth = 0;

enum class Seen { kNothing, kPinned, kDevice };

Seen look_at(const at::Tensor& tensor) {
  if (!tensor.defined()) return Seen::kNothing;
  if (tensor.device().type() == kVirtual) return Seen::kDevice;
  const bool plain = tensor.is_cpu() && tensor.layout() == c10::kStrided && tensor.has_storage() &&
                     tensor.numel() > 0;
  return plain && is_pinned(tensor.const_data_ptr(), 1) ? Seen::kPinned : Seen::kNothing;
}

template <typename Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  }
}

bool only_host_touches_pinned(c10::ArrayRef<const c10::IValue> inputs) {
  bool pinned = false;
  bool device = false;
  for (const c10::IValue& input : inputs) {
    if (input.isDevice()) device = device || input.toDevice().type() == kVirtual;
    each_tensor(input, [&](const at::Tensor& tensor) {
      const Seen seen = look_at(tensor);
      pinned = pinned || seen == Seen::kPinned;
      device = device || seen == Seen::kDevice;
    });
  }
  return pinned && !device;
}

const char* host_name(const std::string& operation) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::string> names;
  const std::lock_guard<std::mutex> guard(mutex);
  return names.try_emplace(operation, operation + " (CPU operator)").first->second.c_str();
}

bool writes(const c10::AliasInfo* alias) {
  if (alias == nullptr) return false;
  if (alias->isWrite()) return true;
  return !alias->containedTypes().empty() && alias->containedTypes()[0].isWrite();
}

void record_operator(const c10::OperatorHandle& op, c10::ArrayRef<const c10::IValue> inputs) {
  const char* name = host_name(op.operator_name().name);
  const auto& arguments = op.schema().arguments();
  Locked machine;
  for (size_t i = 0; i < inputs.size() && i < arguments.size(); ++i) {
    const c10::AliasInfo* alias = arguments[i].alias_info();
    const bool only_a_view = alias != nullptr && !writes(alias);
    if (only_a_view) continue;
    each_tensor(inputs[i],
                [&](const at::Tensor& tensor) { record_host_access(tensor, writes(alias), name); });
  }
}

// Throwing from an observer is not possible: in raise mode the next device operation throws.
std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& call) {
  if (t_device_work_depth > 0 || world().race_mode == RaceMode::kOff) return nullptr;
  const auto inputs = call.inputs();
  if (!only_host_touches_pinned(inputs)) return nullptr;
  const auto name = call.operator_name();
  if (!name) return nullptr;
  const auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
    return nullptr;
  record_operator(*op, inputs);
  return nullptr;
}

}  // namespace

InsideDeviceWork::InsideDeviceWork() { ++t_device_work_depth; }
InsideDeviceWork::~InsideDeviceWork() { --t_device_work_depth; }

void watch_host_operators() {
  static const at::CallbackHandle handle =
      at::addGlobalCallback(at::RecordFunctionCallback(&before_operator)
                                .needsInputs(true)
                                .scopes({at::RecordScope::FUNCTION}));
  (void)handle;
}

void record_host_access(const at::Tensor& tensor, bool write, const char* operation) {
  Locked machine;
  note_access(tensor, kHost, write, operation);
  machine->scheduler.host_acted();
}

}  // namespace vacc
