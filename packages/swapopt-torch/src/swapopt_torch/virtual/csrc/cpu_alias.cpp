#include "cpu_alias.h"
#include <ATen/EmptyTensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include "world.h"

namespace vacc {
namespace {

c10::Storage cpu_storage_over(c10::StorageImpl* device_storage) {
  c10::DataPtr bytes(const_cast<void*>(device_storage->data()), c10::Device(c10::kCPU));
  return {c10::Storage::use_byte_size_t(), device_storage->nbytes(), std::move(bytes),
          c10::GetCPUAllocator(), true};
}

c10::Storage meta_storage_like(const c10::StorageImpl* storage) {
  return {c10::Storage::use_byte_size_t(), storage->nbytes(),
          c10::DataPtr(nullptr, c10::Device(c10::kMeta)), c10::GetAllocator(c10::kMeta), true};
}

at::Tensor number_like(const at::Tensor& wrapped) {
  at::Tensor number = at::zeros({}, wrapped.options().device(c10::kCPU));
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
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
  const bool on_cpu = key_ == c10::DispatchKey::CPU;
  // Operators take numbers from the CPU whatever device their tensors are on.
  if (!on_cpu && device_tensor.unsafeGetTensorImpl()->is_wrapped_number())
    return number_like(device_tensor);
  const auto known = by_device_.find(impl);
  if (known) return tensor_over(pairs_[*known].alias, device_tensor, key_);
  pairs_.push_back({storage, on_cpu ? cpu_storage_over(impl) : meta_storage_like(impl)});
  by_device_.add(impl);
  by_alias_.add(pairs_.back().alias.unsafeGetStorageImpl());
  return tensor_over(pairs_.back().alias, device_tensor, key_);
}

const c10::Storage* AliasMap::device_storage(const c10::StorageImpl* alias_storage) const {
  const auto known = by_alias_.find(alias_storage);
  return known ? &pairs_[*known].device : nullptr;
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  if (tensor.device().type() != kVirtual) return tensor;
  return unowned_alias(tensor);
}

at::Tensor unowned_alias(const at::Tensor& tensor) {
  return AliasMap(c10::DispatchKey::CPU).alias(tensor);
}

at::Tensor device_tensor_like(const c10::Storage& storage, const at::Tensor& alias) {
  return tensor_over(storage, alias, c10::DispatchKey::PrivateUse1);
}

at::Tensor meta_alias(const at::Tensor& cpu_tensor) {
  return AliasMap(c10::DispatchKey::Meta).alias(cpu_tensor);
}

}  // namespace vacc
