#include "generator.h"
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <mutex>
#include <utility>
#include <vector>
#include "world.h"

namespace vacc {
namespace {

class VirtualGenerator final : public c10::GeneratorImpl {
 public:
  explicit VirtualGenerator(int device)
      : c10::GeneratorImpl(c10::Device(kVirtual, static_cast<c10::DeviceIndex>(device)),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(c10::make_intrusive<at::CPUGeneratorImpl>()) {}

  void set_current_seed(uint64_t seed) override { inner->set_current_seed(seed); }
  uint64_t current_seed() const override { return inner->current_seed(); }
  uint64_t seed() override { return inner->seed(); }
  void set_offset(uint64_t) override { refuse_offset(); }
  uint64_t get_offset() const override { refuse_offset(); }
  void set_state(const c10::TensorImpl& state) override { inner->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner->get_state(); }

  c10::intrusive_ptr<at::CPUGeneratorImpl> inner;

 private:
  VirtualGenerator* clone_impl() const override {
    auto* copy = new VirtualGenerator(device().index());
    copy->inner->set_state(*inner->get_state());
    return copy;
  }

  [[noreturn]] static void refuse_offset() {
    TORCH_CHECK(false,
                "Generators of the virtual device have a state, not an offset: use get_state and "
                "set_state.");
  }
};

void exchange_states(at::CPUGeneratorImpl& a, at::CPUGeneratorImpl& b) {
  const at::mt19937 engine = a.engine();
  const auto next_float = a.next_float_normal_sample();
  const auto next_double = a.next_double_normal_sample();
  a.set_engine(b.engine());
  a.set_next_float_normal_sample(b.next_float_normal_sample());
  a.set_next_double_normal_sample(b.next_double_normal_sample());
  b.set_engine(engine);
  b.set_next_float_normal_sample(next_float);
  b.set_next_double_normal_sample(next_double);
}

std::recursive_mutex& random_mutex() {
  static auto* mutex = new std::recursive_mutex();
  return *mutex;
}

std::vector<at::Generator> make_default_generators() {
  std::vector<at::Generator> generators;
  for (int device = 0; device < device_count(); ++device)
    generators.push_back(new_generator(device));
  return generators;
}

}  // namespace

const at::Generator& default_generator(int device) {
  static auto* generators = new std::vector<at::Generator>(make_default_generators());
  return generators->at(static_cast<size_t>(device < 0 ? current_device() : device));
}

at::Generator new_generator(int device) {
  return at::make_generator<VirtualGenerator>(device < 0 ? current_device() : device);
}

at::Generator cpu_generator_inside(const at::Generator& generator) {
  if (generator.device().type() != kVirtual) return generator;
  return at::Generator(generator.get<VirtualGenerator>()->inner);
}

DeviceRandomScope::DeviceRandomScope(int device)
    : cpu_(at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>()),
      device_(default_generator(device).get<VirtualGenerator>()->inner.get()) {
  random_mutex().lock();
  exchange_states(*cpu_, *device_);
}

DeviceRandomScope::~DeviceRandomScope() {
  exchange_states(*cpu_, *device_);
  random_mutex().unlock();
}

}  // namespace vacc
