// Becomes swapopt_torch.virtual.RaceError when it reaches Python.
#pragma once
#include <torch/csrc/Exceptions.h>
#include <string>

namespace vacc {

struct RaceError final : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  PyObject* python_type() override;
};

}  // namespace vacc
