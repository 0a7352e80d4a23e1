// How many bytes one member of a group sends, or receives, by the ring algorithms.
#pragma once
#include <cstddef>

namespace vacc {

// Gathering or scattering `total_bytes` that are spread evenly over the members.
inline size_t ring_pass_nbytes(size_t total_bytes, int members) {
  return total_bytes - total_bytes / static_cast<size_t>(members);
}

// A reduction whose result every member gets: a scatter of sums, then a gather of them.
inline size_t ring_all_reduce_nbytes(size_t nbytes, int members) {
  return 2 * ring_pass_nbytes(nbytes, members);
}

// From or to one member along a chain: everyone passes everything on.
inline size_t chain_nbytes(size_t nbytes, int members) { return members > 1 ? nbytes : 0; }

}  // namespace vacc
