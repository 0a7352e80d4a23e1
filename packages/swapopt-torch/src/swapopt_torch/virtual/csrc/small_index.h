// From a pointer to its position: a scan while there are few, a hash table once there are many.
#pragma once
#include <cstddef>
#include <optional>
#include <unordered_map>
#include <vector>

namespace vacc {

template <typename T>
class SmallIndex {
 public:
  void add(const T* key) {
    keys_.push_back(key);
    if (keys_.size() == kScanLimit) {
      for (size_t i = 0; i < keys_.size(); ++i) positions_.emplace(keys_[i], i);
    } else if (keys_.size() > kScanLimit) {
      positions_.emplace(key, keys_.size() - 1);
    }
  }

  std::optional<size_t> find(const T* key) const {
    if (keys_.size() >= kScanLimit) {
      const auto entry = positions_.find(key);
      return entry == positions_.end() ? std::nullopt : std::make_optional(entry->second);
    }
    for (size_t i = 0; i < keys_.size(); ++i) {
      if (keys_[i] == key) return i;
    }
    return std::nullopt;
  }

 private:
  static constexpr size_t kScanLimit = 12;
  std::vector<const T*> keys_;
  std::unordered_map<const T*, size_t> positions_;
};

}  // namespace vacc
