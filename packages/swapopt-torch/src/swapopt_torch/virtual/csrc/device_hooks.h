#pragma once
#include <c10/core/Stream.h>

namespace vacc {

void install_hooks();
void wait_on_host_for(const c10::Stream& stream);

}  // namespace vacc
