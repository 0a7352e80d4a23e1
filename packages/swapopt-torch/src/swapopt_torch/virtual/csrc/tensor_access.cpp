#include "tensor_access.h"
#include "late.h"
#include "world.h"

namespace vacc {

void note_access(const at::Tensor& tensor, ActorId actor, bool write, const char* operation) {
  ShadowMemory& memory = world().memory;
  if (!memory.detect || !tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
  const ByteRange range = byte_range(tensor);
  memory.access(actor, range.begin, range.nbytes, write, operation);
}

}  // namespace vacc
