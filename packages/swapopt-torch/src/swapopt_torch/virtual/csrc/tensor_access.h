// From tensors to the byte ranges that the race detector knows.
#pragma once
#include <ATen/core/Tensor.h>
#include "core/vector_clock.h"

namespace vacc {

void note_access(const at::Tensor& tensor, ActorId actor, bool write, const char* operation);

}  // namespace vacc
