// Device tensors as CPU tensors over the same bytes, and back.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <vector>
#include "host_access.h"
#include "small_index.h"

namespace vacc {

// One storage of the CPU, or of the meta device on a dry machine, per device storage, so that
// tensors that share memory still do.
class AliasMap {
 public:
  explicit AliasMap(c10::DispatchKey key) : key_(key) {}

  at::Tensor alias(const at::Tensor& device_tensor);
  // The device tensor's storage behind a storage made here, or nullptr.
  const c10::Storage* device_storage(const c10::StorageImpl* alias_storage) const;

 private:
  struct Pair {
    c10::Storage device, alias;
  };
  c10::DispatchKey key_;
  std::vector<Pair> pairs_;
  SmallIndex<c10::StorageImpl> by_device_, by_alias_;
};

at::Tensor cpu_alias(const at::Tensor& tensor);  // a CPU tensor is returned as it is

// A CPU tensor, too, is only looked at: its memory may go away.
at::Tensor unowned_alias(const at::Tensor& tensor);

at::Tensor device_tensor_like(const c10::Storage& storage, const at::Tensor& alias);

at::Tensor meta_alias(const at::Tensor& cpu_tensor);

// CPU kernels called from here run below autograd, autocast and Python modes.
class CpuKernelScope {
 public:
  CpuKernelScope()
      : skip_(c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::Python,
                                   c10::DispatchKey::PythonTLSSnapshot})) {}

 private:
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard skip_;
  InsideDeviceWork inside_;
};

}  // namespace vacc
