#include "bind.h"
#include <pybind11/chrono.h>
#include "group.h"

namespace vacc {
namespace {

// The function is never let go: a group may outlive the interpreter.
Group::MakeTransport make_with(pybind11::function function) {
  auto* kept = new pybind11::function(std::move(function));
  return [kept](const Group::StoreRef& store, int rank, int size, Group::Milliseconds timeout) {
    pybind11::gil_scoped_acquire held;
    return (*kept)(store, rank, size, timeout).cast<c10::intrusive_ptr<c10d::Backend>>();
  };
}

}  // namespace

void bind_collectives(pybind11::module_& m) {
  pybind11::module_::import("torch._C._distributed_c10d");  // its classes are the base ones
  pybind11::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend>(m, "Group")
      .def(pybind11::init([](c10::intrusive_ptr<c10d::Backend> transport,
                             pybind11::function make_transport) {
        return c10::make_intrusive<Group>(std::move(transport),
                                          make_with(std::move(make_transport)));
      }))
      .def_property_readonly("options", &Group::getBackendOptions)
      // torch calls it on members of a group that take no part in a split of it.
      .def("perform_nocolor_split", [](const Group&, const c10::Device&) {});
}

}  // namespace vacc
