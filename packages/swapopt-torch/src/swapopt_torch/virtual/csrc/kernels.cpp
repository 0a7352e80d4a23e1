// Kernels of the device's own: memory, shape and copies. All else goes to the fallback.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <set>
#include <string>
#include "copy.h"
#include "cpu_alias.h"
#include "device_memory.h"
#include "fallback.h"
#include "operator_info.h"
#include "world.h"

namespace vacc {
namespace {

using Sizes = c10::IntArrayRef;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;

c10::Device device_for(std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const int index = device ? device_or_current(*device) : current_device();
  return {kVirtual, static_cast<c10::DeviceIndex>(index)};
}

// torch.use_deterministic_algorithms() promises the same uninitialised memory everywhere.
at::Tensor filled_if_deterministic(at::Tensor tensor) {
  if (world().dry) return tensor;
  const auto& settings = at::globalContext();
  if (settings.deterministicAlgorithms() && settings.deterministicFillUninitializedMemory()) {
    const CpuKernelScope scope;
    at::Tensor alias = cpu_alias(tensor);
    at::native::fill_empty_deterministic_(alias);
  }
  return tensor;
}

at::Tensor empty(Sizes size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool> pin,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_for(device, pin));
  return filled_if_deterministic(at::detail::empty_generic(
      size, &device_allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(Sizes size, Sizes stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device,
                         std::optional<bool> pin) {
  const c10::DeviceGuard guard(device_for(device, pin));
  return filled_if_deterministic(at::detail::empty_strided_generic(
      size, stride, &device_allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype)));
}

// Zeros that take no memory would need a storage without bytes; here they are zeros like others.
at::Tensor efficient_zeros(Sizes size, std::optional<at::ScalarType> dtype,
                           std::optional<at::Layout> layout, std::optional<at::Device> device,
                           std::optional<bool> pin) {
  return empty(size, dtype, layout, device, pin, std::nullopt).zero_();
}

void grow_storage(const at::Tensor& tensor, size_t nbytes) {
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (nbytes > storage->nbytes()) resize_device_storage(storage, nbytes);
}

const at::Tensor& resize_(const at::Tensor& self, Sizes size,
                          std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  grow_storage(self, at::detail::computeStorageNbytesContiguous(size, self.itemsize(),
                                                                self.storage_offset()));
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t offset, Sizes size,
                               Sizes stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  if (stride.data() != nullptr || size.empty()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  }
  grow_storage(self, at::detail::computeStorageNbytes(impl->sizes(), impl->strides(),
                                                      self.itemsize(), offset));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const std::vector<int64_t> size{static_cast<int64_t>(source.nbytes() / self.itemsize())};
  return set_storage_offset(self, std::move(source), 0, size, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(),
                            source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0,
                       allocate_device(0, self.device().index()), &device_allocator(), true);
  const std::vector<int64_t> size{0};
  return set_storage_offset(self, std::move(nothing), 0, size, {});
}

at::Tensor as_strided(const at::Tensor& self, Sizes size, Sizes stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, Sizes size) { return at::native::view(self, size); }

at::Tensor reshape_alias(const at::Tensor& self, Sizes size, Sizes stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

const std::set<std::string>& own_kernels() {
  static const std::set<std::string> names{"_efficientzerotensor",
                                           "empty.memory_format",
                                           "empty_strided",
                                           "resize_",
                                           "set_.source_Storage_storage_offset",
                                           "set_.source_Storage",
                                           "set_.source_Tensor",
                                           "set_",
                                           "_copy_from",
                                           "_copy_from_and_resize",
                                           "_local_scalar_dense",
                                           "as_strided",
                                           "view",
                                           "_reshape_alias",
                                           "record_stream"};
  return names;
}

// torch would decompose these before they reach the fallback. With a CPU kernel the numbers would
// then be others than on the CPU; a foreach operator would be a launch per tensor.
bool would_bypass_fallback(const c10::OperatorHandle& op) {
  using Key = c10::DispatchKey;
  const bool decomposes = op.hasKernelForDispatchKey(Key::CompositeExplicitAutograd) ||
                          op.hasKernelForDispatchKey(Key::CompositeExplicitAutogradNonFunctional) ||
                          op.hasKernelForDispatchKey(Key::CompositeImplicitAutograd);
  const bool is_foreach = op.operator_name().name.rfind("aten::_foreach_", 0) == 0;
  return decomposes && (is_foreach || op.hasKernelForDispatchKey(Key::CPU));
}

void pin_to_fallback(torch::Library& library) {
  for (const std::string& name : aten_operators(&would_bypass_fallback)) {
    if (own_kernels().count(name) > 0) continue;
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_efficientzerotensor", &efficient_zeros);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_empty);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &read_scalar);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("record_stream", &record_stream);
  // torch picks a convolution by device type; choose on the CPU instead, as the CPU would.
  for (const char* name : {"convolution", "convolution_backward", "_convolution"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  pin_to_fallback(library);
}

// copy_ falls through these keys, _copy_from does not: without this .conj() recurses for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace vacc
