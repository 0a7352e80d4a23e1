// What the Python side needs to register the process group.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace vacc {

void bind_collectives(pybind11::module_& m);

}  // namespace vacc
