// What blocks the host until a device is done, or asks whether it is.
#pragma once
#include "late.h"
#include "world.h"

namespace vacc {

// `wait(scheduler)` moves the host's clock. Late copies that are before the host now happen, and
// races are raised outside the lock.
template <typename Wait>
void host_waits(Wait wait) {
  {
    Locked machine;
    wait(machine->scheduler);
    late_copies().run_before_host();
  }
  world().raise_new_races();
}

// `ask(scheduler)` says whether something is done; who hears that it is has waited for it.
template <typename Ask>
bool host_asks(Ask ask) {
  Locked machine;
  const bool done = ask(machine->scheduler);
  if (done) late_copies().run_before_host();
  return done;
}

}  // namespace vacc
