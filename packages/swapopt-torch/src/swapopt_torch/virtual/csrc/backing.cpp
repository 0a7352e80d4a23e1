#include "backing.h"
#include <c10/core/impl/alloc_cpu.h>
#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>
#include "world.h"

namespace vacc {
namespace {

// Freed memory stays mapped and poisoned, so that stale pointers read NaN instead of other data.
class Quarantine {
 public:
  struct Entry {
    void* data;
    size_t nbytes;
    c10::Storage adopted;
  };

  void add(Entry entry) {
    held_bytes_ += entry.nbytes;
    entries_.push_back(std::move(entry));
    while (held_bytes_ > kLimitBytes) release_oldest();
  }

 private:
  static constexpr size_t kLimitBytes = 64 << 20;
  static constexpr size_t kInspectedBytes = 4096;

  void release_oldest() {
    Entry entry = std::move(entries_.front());
    entries_.pop_front();
    held_bytes_ -= entry.nbytes;
    report_if_written(entry);
    if (!entry.adopted) c10::free_cpu(entry.data);
  }

  static void report_if_written(const Entry& entry) {
    const auto* bytes = static_cast<const unsigned char*>(entry.data);
    const size_t inspected = std::min(entry.nbytes, kInspectedBytes);
    const bool untouched =
        std::all_of(bytes, bytes + inspected, [](unsigned char byte) { return byte == kPoison; });
    if (untouched || world().race_mode == RaceMode::kOff) return;
    world().memory.races.push_back({"write after free", "an unknown writer", "an unknown stream",
                                    "free", "host",
                                    std::to_string(entry.nbytes) + " bytes of freed memory", 0,
                                    static_cast<int64_t>(entry.nbytes)});
  }

  std::deque<Entry> entries_;
  size_t held_bytes_ = 0;
};

Quarantine& quarantine() {
  static auto* instance = new Quarantine();
  return *instance;
}

}  // namespace

std::shared_ptr<Backing> Backing::allocate(size_t nbytes, Use use) {
  if (world().dry)
    return std::make_shared<Backing>(std::make_unique<AddressSpace>(nbytes, use), nbytes);
  void* data = c10::alloc_cpu(nbytes);
  std::memset(data, kPoison, nbytes);
  return std::make_shared<Backing>(data, nbytes, c10::Storage());
}

std::shared_ptr<Backing> Backing::adopt(const c10::Storage& storage) {
  return std::make_shared<Backing>(const_cast<void*>(storage.data()), storage.nbytes(), storage);
}

Backing::Backing(void* data, size_t nbytes, c10::Storage adopted)
    : data_(data), nbytes_(nbytes), adopted_(std::move(adopted)) {}

Backing::Backing(std::unique_ptr<AddressSpace> addresses, size_t nbytes)
    : data_(addresses->data()), nbytes_(nbytes), addresses_(std::move(addresses)) {}

Backing::~Backing() {
  if (addresses_) return;
  Locked locked;
  const bool shared_with_a_kernel = adopted_ && adopted_.use_count() > 1;
  if (shared_with_a_kernel) return;
  std::memset(data_, kPoison, nbytes_);
  quarantine().add({data_, nbytes_, std::move(adopted_)});
}

}  // namespace vacc
