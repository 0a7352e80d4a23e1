#include "fallback.h"
#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>
#include "cpu_alias.h"
#include "device_memory.h"
#include "dry.h"
#include "generator.h"
#include "late.h"
#include "operator_info.h"
#include "tensor_access.h"
#include "world.h"

namespace vacc {
namespace {

class FallbackCall {
 public:
  FallbackCall(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op),
        info_(operator_info(op)),
        stack_(stack),
        first_(stack.size() - op.schema().arguments().size()) {}

  void run() {
    replace_arguments();
    check_devices();
    announce();
    compute();
    if (does_work_) book_time();
    follow_resized_outputs();
    replace_results();
  }

 private:
  struct Argument {
    at::Tensor device, alias;
    bool writes, only_a_view;
  };

  const char* name() const { return info_.name.c_str(); }

  void replace_arguments() {
    for (size_t i = 0; i < info_.arguments.size(); ++i)
      replace_argument(stack_[first_ + i], info_.arguments[i]);
  }

  void replace_argument(c10::IValue& value, const ArgumentInfo& argument) {
    if (value.isTensor()) {
      value = alias_of(value.toTensor(), argument);
    } else if (value.isTensorList()) {
      replace_list(value, argument);
    } else if (value.isOptionalTensorList()) {
      replace_optional_list(value, argument);
    } else if (value.isDevice()) {
      replace_device(value);
    } else if (value.isGenerator()) {
      has_generator_ = true;
      value = dry_ ? c10::IValue() : c10::IValue(cpu_generator_inside(value.toGenerator()));
    } else if (argument.is_pin_memory && value.isBool()) {
      value = c10::IValue();
    }
  }

  void replace_list(c10::IValue& value, const ArgumentInfo& argument) {
    std::vector<at::Tensor> tensors = value.toTensorVector();
    if (launches_ == 0 && info_.is_list_operator) launches_ = static_cast<int64_t>(tensors.size());
    for (at::Tensor& tensor : tensors) tensor = alias_of(tensor, argument);
    value = c10::IValue(std::move(tensors));
  }

  void replace_optional_list(c10::IValue& value, const ArgumentInfo& argument) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      tensors.push_back(tensor ? std::make_optional(alias_of(*tensor, argument)) : std::nullopt);
    }
    value = c10::IValue(std::move(tensors));
  }

  void replace_device(c10::IValue& value) {
    const c10::Device device = value.toDevice();
    if (device.type() != kVirtual) {
      result_leaves_ = true;
      reads_zeros_ = dry_ && device.is_cpu();
      if (reads_zeros_) value = c10::Device(c10::kMeta);
      return;
    }
    if (device_ < 0) device_ = device_or_current(device);
    value = c10::Device(dry_ ? c10::kMeta : c10::kCPU);
  }

  at::Tensor alias_of(const at::Tensor& tensor, const ArgumentInfo& argument) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kVirtual) {
      has_cpu_tensor_ = has_cpu_tensor_ || (tensor.is_cpu() && tensor.dim() > 0);
      return dry_ && tensor.is_cpu() && tensor.dim() > 0 ? meta_alias(tensor) : tensor;
    }
    const int device = tensor.device().index();
    TORCH_CHECK(device_ < 0 || device_ == device || tensor.dim() == 0, info_.name,
                ": Expected all tensors to be on the same device, but found virtual:", device_,
                " and virtual:", device, ".");
    if (device_ < 0) device_ = device;
    if (!argument.only_a_view) {
      touched_.push_back(byte_range(tensor));
      check_not_released(tensor, touched_.back(), name());
      traffic_bytes_ += tensor.nbytes() * (argument.writes ? 2 : 1);
    }
    arguments_.push_back({tensor, aliases_.alias(tensor), argument.writes, argument.only_a_view});
    by_alias_.add(arguments_.back().alias.unsafeGetTensorImpl());
    return arguments_.back().alias;
  }

  void check_devices() const {
    TORCH_CHECK(device_ >= 0, info_.name, ": no argument names a virtual device.");
    TORCH_CHECK(!has_cpu_tensor_ || info_.mixes_devices, info_.name,
                ": Expected all tensors to be on the same device, but found cpu and virtual:",
                device_, ".");
  }

  // Tells clock, detector and late mode what is about to happen. Pure views cost nothing.
  void announce() {
    ++info_.calls;
    {
      Locked machine;
      actor_ = current_actor(device_);
      does_work_ = !touched_.empty() || makes_results_from_nothing();
      if (does_work_) {
        machine->scheduler.order_next(actor_);
        note_accesses();
        late_copies().run_before({actor_, std::move(touched_)});
      }
    }
    world().raise_new_races();
  }

  // Factories such as arange and rand have no device tensor among their arguments.
  bool makes_results_from_nothing() const { return arguments_.empty(); }

  void book_time() {
    traffic_bytes_ += bytes_of_new_results();
    Locked machine;
    const Profile& profile = machine->scheduler.profile;
    const int64_t launches = profile.list_launch_per_tensor ? std::max<int64_t>(1, launches_) : 1;
    machine->scheduler.book(actor_, {Lane::kCompute, name(), static_cast<int64_t>(traffic_bytes_),
                                     profile.kernel_ns(traffic_bytes_, launches), launches});
  }

  size_t bytes_of_new_results() const {
    size_t nbytes = 0;
    for (size_t i = stack_.size() - op_.schema().returns().size(); i < stack_.size(); ++i) {
      if (stack_[i].isTensor()) {
        nbytes += bytes_if_new(stack_[i].toTensor());
      } else if (stack_[i].isTensorList()) {
        for (const at::Tensor& tensor : stack_[i].toTensorVector()) nbytes += bytes_if_new(tensor);
      }
    }
    return nbytes;
  }

  size_t bytes_if_new(const at::Tensor& result) const {
    const bool known = !result.defined() || by_alias_.find(result.unsafeGetTensorImpl());
    return known || result.layout() != c10::kStrided ? 0 : result.nbytes();
  }

  void note_accesses() const {
    for (const bool writes : {false, true}) {
      for (const Argument& argument : arguments_) {
        if (!argument.only_a_view && argument.writes == writes)
          note_access(argument.device, actor_, writes, name());
      }
    }
  }

  void compute() {
    const CpuKernelScope scope;
    if (dry_) return compute_shapes(op_, info_, stack_);
    std::optional<DeviceRandomScope> random;
    if (info_.draws_random_numbers && !has_generator_) random.emplace(device_);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
  }

  // out= variants may have given their output other memory or another shape.
  void follow_resized_outputs() {
    for (const Argument& argument : arguments_) {
      if (!argument.writes) continue;
      auto* alias = argument.alias.unsafeGetTensorImpl();
      auto* device = argument.device.unsafeGetTensorImpl();
      auto* storage = device->unsafe_storage().unsafeGetStorageImpl();
      const c10::Storage& grown = alias->unsafe_storage();
      if (dry_ ? grown.nbytes() != storage->nbytes() : grown.data() != storage->data()) {
        storage->set_data_ptr_noswap(memory_of(grown));
        storage->set_nbytes(grown.nbytes());
        note_write(argument.device);
      }
      const bool reshaped = alias->sizes() != device->sizes() ||
                            alias->strides() != device->strides() ||
                            alias->storage_offset() != device->storage_offset();
      if (reshaped)
        device->set_sizes_and_strides(alias->sizes(), alias->strides(), alias->storage_offset());
    }
  }

  void replace_results() {
    if (result_leaves_ && !reads_zeros_) return;
    const size_t first = stack_.size() - op_.schema().returns().size();
    for (size_t i = first; i < stack_.size(); ++i) {
      c10::IValue& value = stack_[i];
      if (value.isTensor()) {
        value = to_device(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> tensors = value.toTensorVector();
        for (at::Tensor& tensor : tensors) tensor = to_device(tensor);
        value = c10::IValue(std::move(tensors));
      }
    }
  }

  at::Tensor to_device(const at::Tensor& result) {
    if (!result.defined() || !(dry_ ? result.is_meta() : result.is_cpu())) return result;
    if (reads_zeros_) return zeros_on_cpu(result);
    if (const auto argument = by_alias_.find(result.unsafeGetTensorImpl()))
      return arguments_[*argument].device;
    TORCH_CHECK(result.layout() == c10::kStrided && !result.is_quantized(), info_.name,
                ": the virtual device has strided tensors only, and this operator returned layout ",
                result.layout(), ". Run it on the CPU.");
    const c10::Storage& storage = result.unsafeGetTensorImpl()->unsafe_storage();
    if (const c10::Storage* input = aliases_.device_storage(storage.unsafeGetStorageImpl())) {
      return device_tensor_like(*input, result);
    }
    return device_tensor_like(adopted(storage), result);
  }

  // What the CPU kernel allocated; a dry one allocated nothing.
  c10::DataPtr memory_of(const c10::Storage& result) const {
    return dry_ ? allocate_device(result.nbytes(), device_) : adopt_on_device(result, device_);
  }

  // Fresh memory, once per storage: results may share it.
  const c10::Storage& adopted(const c10::Storage& storage) {
    auto [entry, is_new] = adopted_.try_emplace(storage.unsafeGetStorageImpl());
    if (is_new) {
      entry->second = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                                   memory_of(storage), &device_allocator(), true);
      Locked machine;
      machine->memory.access(actor_, reinterpret_cast<uintptr_t>(entry->second.data()),
                             storage.nbytes(), true, name());
    }
    return entry->second;
  }

  void note_write(const at::Tensor& tensor) const {
    Locked machine;
    note_access(tensor, actor_, true, name());
  }

  const c10::OperatorHandle& op_;
  OperatorInfo& info_;
  torch::jit::Stack& stack_;
  size_t first_;
  int device_ = -1;
  ActorId actor_ = kHost;
  int64_t launches_ = 0;
  size_t traffic_bytes_ = 0;
  bool does_work_ = false;
  bool has_generator_ = false, has_cpu_tensor_ = false, result_leaves_ = false,
       reads_zeros_ = false;
  const bool dry_ = world().dry;
  AliasMap aliases_{dry_ ? c10::DispatchKey::Meta : c10::DispatchKey::CPU};
  std::vector<Argument> arguments_;
  SmallIndex<c10::TensorImpl> by_alias_;  // same positions as arguments_
  std::vector<ByteRange> touched_;        // what is read or written, beside pure views
  std::unordered_map<const c10::StorageImpl*, c10::Storage> adopted_;
};

}  // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  FallbackCall(op, *stack).run();
}

}  // namespace vacc
