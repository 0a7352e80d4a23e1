#include "cpu_alias.h"
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include "world.h"

namespace vacc {
namespace {

c10::Storage cpu_storage_over(c10::StorageImpl* device_storage) {
  c10::DataPtr bytes(const_cast<void*>(device_storage->data()), c10::Device(c10::kCPU));
  return {c10::Storage::use_byte_size_t(), device_storage->nbytes(), std::move(bytes),
          c10::GetCPUAllocator(), true};
}

at::Tensor tensor_over(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage),
                                                         c10::DispatchKeySet(key), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return tensor;
}

}  // namespace

at::Tensor AliasMap::alias(const at::Tensor& device_tensor) {
  TORCH_CHECK(device_tensor.layout() == c10::kStrided && !device_tensor.is_quantized(),
              "The virtual device computes on strided tensors only, found layout ",
              device_tensor.layout(), ". Move the tensor to the CPU or make it dense first.");
  const c10::Storage& storage = device_tensor.unsafeGetTensorImpl()->unsafe_storage();
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  const auto known = by_device_.find(impl);
  if (known) return tensor_over(pairs_[*known].cpu, device_tensor, c10::DispatchKey::CPU);
  pairs_.push_back({storage, cpu_storage_over(impl)});
  by_device_.add(impl);
  by_cpu_.add(pairs_.back().cpu.unsafeGetStorageImpl());
  return tensor_over(pairs_.back().cpu, device_tensor, c10::DispatchKey::CPU);
}

const c10::Storage* AliasMap::device_storage(const c10::StorageImpl* cpu_storage) const {
  const auto known = by_cpu_.find(cpu_storage);
  return known ? &pairs_[*known].device : nullptr;
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  if (tensor.device().type() != kVirtual) return tensor;
  return AliasMap().alias(tensor);
}

at::Tensor unowned_alias(const at::Tensor& tensor) { return AliasMap().alias(tensor); }

at::Tensor device_tensor_like(const c10::Storage& storage, const at::Tensor& cpu_tensor) {
  return tensor_over(storage, cpu_tensor, c10::DispatchKey::PrivateUse1);
}

}  // namespace vacc
