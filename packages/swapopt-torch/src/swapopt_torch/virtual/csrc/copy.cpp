// Copies between host and device and between devices.
#include "copy.h"
#include <ATen/ExpandUtils.h>
#include <utility>
#include "cpu_alias.h"
#include "device_hooks.h"
#include "dry.h"
#include "late.h"
#include "operator_info.h"
#include "pinned_memory.h"
#include "tensor_access.h"
#include "world.h"

namespace vacc {
namespace {

enum class Direction { kH2D, kD2H, kSameDevice, kPeer };

class CopyCall {
 public:
  CopyCall(const at::Tensor& source, const at::Tensor& destination, bool non_blocking)
      : source_(source),
        destination_(destination),
        direction_(direction_of(source, destination)),
        device_(destination.device().type() == kVirtual ? destination.device().index()
                                                        : source.device().index()),
        nbytes_(destination.nbytes()),
        asynchronous_(is_asynchronous(non_blocking)) {}

  void run() {
    static OperatorInfo& info = operator_info("aten::_copy_from");
    ++info.calls;
    check_not_released(source_, byte_range(source_), name());
    check_not_released(destination_, byte_range(destination_), name());
    announce();
    world().raise_new_races();
    if (!postponed_) move_bytes();
    if (!asynchronous_) wait_on_host_for(current_stream(device_));
  }

 private:
  static Direction direction_of(const at::Tensor& source, const at::Tensor& destination) {
    const bool from_device = source.device().type() == kVirtual;
    const bool to_device = destination.device().type() == kVirtual;
    if (from_device && to_device) {
      return source.device() == destination.device() ? Direction::kSameDevice : Direction::kPeer;
    }
    return to_device ? Direction::kH2D : Direction::kD2H;
  }

  bool crosses_the_link() const {
    return direction_ == Direction::kH2D || direction_ == Direction::kD2H;
  }
  const at::Tensor& host_side() const {
    return direction_ == Direction::kH2D ? source_ : destination_;
  }

  bool is_asynchronous(bool non_blocking) const {
    if (!crosses_the_link()) return true;
    const ByteRange range = byte_range(host_side());
    return non_blocking && range.nbytes > 0 &&
           is_pinned(reinterpret_cast<const void*>(range.begin), range.nbytes);
  }

  const char* name() const {
    switch (direction_) {
      case Direction::kH2D:
        return "copy host to device";
      case Direction::kD2H:
        return "copy device to host";
      case Direction::kPeer:
        return "copy between devices";
      default:
        return "copy on the device";
    }
  }

  void announce() {
    Locked machine;
    const ActorId stream = current_actor(device_);
    const ActorId peer =
        direction_ == Direction::kPeer ? current_actor(source_.device().index()) : stream;
    order(*machine, peer, stream);
    machine->scheduler.issue(stream, work(machine->scheduler.profile));
    note_access(source_, stream, false, name());
    note_access(destination_, stream, true, name());
    order(*machine, stream, peer);
    keep_pinned_until_done(*machine, stream);
    late_copies().run_before({stream, {byte_range(source_), byte_range(destination_)}});
    postponed_ = asynchronous_ && crosses_the_link() && late_copies().enabled;
    if (postponed_)
      late_copies().defer(stream, unowned_alias(source_), unowned_alias(destination_));
  }

  Work work(const Profile& profile) const {
    const auto nbytes = static_cast<int64_t>(nbytes_);
    switch (direction_) {
      case Direction::kH2D:
        return {Lane::kH2D, name(), nbytes, profile.copy_ns(Lane::kH2D, nbytes_)};
      case Direction::kD2H:
        return {Lane::kD2H, name(), nbytes, profile.copy_ns(Lane::kD2H, nbytes_)};
      case Direction::kPeer:
        return {Lane::kH2D, name(), nbytes, profile.copy_ns(Lane::kH2D, nbytes_)};
      default:
        return {Lane::kCompute, name(), nbytes, profile.kernel_ns(2 * nbytes_, 1)};
    }
  }

  // Copies between devices are ordered with the current streams of both.
  static void order(World& machine, ActorId first, ActorId second) {
    if (first == second) return;
    EventState event;
    machine.scheduler.record(first, event);
    machine.scheduler.wait(second, event);
  }

  // The pinned allocator reuses a freed block only after the copies made from or to its tensors.
  void keep_pinned_until_done(World& machine, ActorId stream) const {
    if (!asynchronous_ || !crosses_the_link()) return;
    Block* block = machine.memory.find(byte_range(host_side()).begin);
    const bool owned = block != nullptr && block->place == Place::kPinned &&
                       host_side().storage().data_ptr().get_deleter() == pinned_deleter();
    if (owned) block->recorded.insert(stream);
  }

  void move_bytes() const {
    const CpuKernelScope scope;
    if (world().dry) return read_zeros();
    cpu_alias(destination_).copy_(cpu_alias(source_));
  }

  // A dry device holds nothing: what is read from it are zeros. Pinned memory stays as it is, so
  // that host memory which is zeros since it was mapped takes no pages.
  void read_zeros() const {
    TORCH_CHECK(at::is_expandable_to(source_.sizes(), destination_.sizes()), name(), ": a tensor ",
                "of shape ", source_.sizes(), " does not fit into one of shape ",
                destination_.sizes(), ".");
    if (direction_ != Direction::kD2H) return;
    const ByteRange range = byte_range(destination_);
    if (range.nbytes > 0 && !is_pinned(reinterpret_cast<const void*>(range.begin), range.nbytes))
      at::Tensor(destination_).zero_();
  }

  const at::Tensor& source_;
  const at::Tensor& destination_;
  Direction direction_;
  int device_;
  size_t nbytes_;
  bool asynchronous_;
  bool postponed_ = false;
};

}  // namespace

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  CopyCall(source, destination, non_blocking).run();
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
  if (source.sizes() != destination.sizes()) destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

at::Scalar read_scalar(const at::Tensor& tensor) {
  constexpr const char* kName = "item";
  check_not_released(tensor, byte_range(tensor), kName);
  const int device = tensor.device().index();
  {
    Locked machine;
    const ActorId stream = current_actor(device);
    const Profile& profile = machine->scheduler.profile;
    machine->scheduler.issue(stream, {Lane::kD2H, kName, static_cast<int64_t>(tensor.itemsize()),
                                      profile.copy_ns(Lane::kD2H, tensor.itemsize())});
    note_access(tensor, stream, false, kName);
    late_copies().run_before({stream, {byte_range(tensor)}});
  }
  wait_on_host_for(current_stream(device));
  const CpuKernelScope scope;
  if (world().dry) return zeros_on_cpu(tensor).item();
  return cpu_alias(tensor).item();
}

}  // namespace vacc
