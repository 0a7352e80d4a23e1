#include "address_space.h"
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <cerrno>
#include <cstring>

namespace vacc {

AddressSpace::AddressSpace(size_t nbytes, Use use) : nbytes_(nbytes) {
  const int access = use == Use::kDevice ? PROT_NONE : PROT_READ | PROT_WRITE;
  data_ = ::mmap(nullptr, nbytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(data_ != MAP_FAILED, "A dry virtual device could not reserve ", nbytes,
              " bytes of address space: ", std::strerror(errno),
              ". It needs no memory, but addresses: raise the limit on them (ulimit -v).");
}

AddressSpace::~AddressSpace() { ::munmap(data_, nbytes_); }

}  // namespace vacc
