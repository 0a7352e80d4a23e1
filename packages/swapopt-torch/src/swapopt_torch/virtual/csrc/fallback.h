// Every operator without a kernel of its own: run the CPU kernel on the same bytes.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

namespace vacc {

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace vacc
