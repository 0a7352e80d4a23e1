#include "bind.h"
#include "group.h"

namespace vacc {

void bind_collectives(pybind11::module_& m) {
  pybind11::module_::import("torch._C._distributed_c10d");  // its classes are the base ones
  pybind11::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend>(m, "Group")
      .def(pybind11::init([](c10::intrusive_ptr<c10d::Backend> transport) {
        return c10::make_intrusive<Group>(std::move(transport));
      }))
      // torch calls it on members of a group that take no part in a split of it.
      .def("perform_nocolor_split", [](const Group&, const c10::Device&) {});
}

}  // namespace vacc
