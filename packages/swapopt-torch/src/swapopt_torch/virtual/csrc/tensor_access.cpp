#include "tensor_access.h"
#include <algorithm>
#include "world.h"

namespace vacc {
namespace {

constexpr size_t kMaxRuns = 256;

struct Dimension {
  int64_t size, stride;
};

// Dimensions that matter, innermost first.
std::vector<Dimension> dimensions_of(const at::Tensor& tensor) {
  std::vector<Dimension> dimensions;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) != 0)
      dimensions.push_back({tensor.size(i), tensor.stride(i)});
  }
  std::sort(dimensions.begin(), dimensions.end(),
            [](const Dimension& a, const Dimension& b) { return a.stride < b.stride; });
  return dimensions;
}

// Merges the inner dimensions that lie without gaps; returns how many elements they make.
int64_t strip_dense(std::vector<Dimension>& dimensions) {
  int64_t run = 1;
  while (!dimensions.empty() && dimensions.front().stride <= run) {
    run = std::max(run, (dimensions.front().size - 1) * dimensions.front().stride + run);
    dimensions.erase(dimensions.begin());
  }
  return run;
}

}  // namespace

ByteRange byte_range(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  int64_t span = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    span += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto* storage =
      static_cast<const char*>(tensor.unsafeGetTensorImpl()->unsafe_storage().data());
  const auto offset_bytes = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  return {reinterpret_cast<uintptr_t>(storage) + offset_bytes,
          static_cast<size_t>(span) * tensor.itemsize()};
}

std::vector<ByteRange> byte_runs(const at::Tensor& tensor) {
  const ByteRange all = byte_range(tensor);
  if (all.nbytes == 0 || tensor.is_non_overlapping_and_dense()) return {all};
  std::vector<Dimension> outer = dimensions_of(tensor);
  const auto run_bytes = static_cast<size_t>(strip_dense(outer)) * tensor.itemsize();
  std::vector<ByteRange> runs{{all.begin, run_bytes}};
  for (const Dimension& dimension : outer) {
    const size_t repeated = runs.size();
    if (repeated * static_cast<size_t>(dimension.size) > kMaxRuns) return {all};
    for (int64_t step = 1; step < dimension.size; ++step) {
      const uintptr_t shift = static_cast<uintptr_t>(step * dimension.stride) * tensor.itemsize();
      for (size_t i = 0; i < repeated; ++i) runs.push_back({runs[i].begin + shift, run_bytes});
    }
  }
  return runs;
}

void note_access(const at::Tensor& tensor, ActorId actor, bool write, const char* operation) {
  ShadowMemory& memory = world().memory;
  if (!memory.detect || !tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
  if (tensor.is_contiguous()) {
    const ByteRange range = byte_range(tensor);
    memory.access(actor, range.begin, range.nbytes, write, operation);
    return;
  }
  for (const ByteRange& run : byte_runs(tensor))
    memory.access(actor, run.begin, run.nbytes, write, operation);
}

void check_not_released(const at::Tensor& tensor, const ByteRange& range, const char* operation) {
  if (range.nbytes == 0) return;
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  if (range.end() <= reinterpret_cast<uintptr_t>(storage.data()) + storage.nbytes()) return;
  TORCH_CHECK(false, operation, ": the storage of a tensor of shape ", tensor.sizes(),
              " and dtype ", tensor.dtype(), " on ", tensor.device(), " was released: it holds ",
              storage.nbytes(),
              " bytes after untyped_storage().resize_(). "
              "Give it its bytes back with untyped_storage().resize_(nbytes), and fill it, before "
              "this operator runs.");
}

}  // namespace vacc
