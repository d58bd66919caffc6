// What torch asks of any accelerator: current device and stream, events, waiting; and torch.accelerator's hooks.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace sim {

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device d) const override {
    c10::Device before = getDevice();
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return {KIND, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device d) const override {
    if (d.index() < 0) return;
    device(d.index());
    current_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) current_device = d.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(num_devices()); }

  c10::Stream getStream(c10::Device d) const override { return spelled(index_of(d), current_stream_id(index_of(d))); }
  c10::Stream getDefaultStream(c10::Device d) const override { return spelled(index_of(d), 0); }
  c10::Stream getNewStream(c10::Device d, int = 0) const override {
    return spelled(index_of(d), device(index_of(d)).new_stream());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool = false) const override { return getNewStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    c10::Stream before = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return before;
  }
  bool queryStream(const c10::Stream& s) const override { return stream(s).is_done(stream(s).last()); }
  void synchronizeStream(const c10::Stream& s) const override {
    sim::record.count("stream synchronised");
    stream(s).wait_all();
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    sim::record.count("device synchronised");
    device(index < 0 ? current_device : index).wait_all();
  }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventHandle(std::make_shared<Event>());
    Event::record(*static_cast<EventHandle*>(*event), stream(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event != nullptr) Event::block(*static_cast<EventHandle*>(event), stream(s));
  }
  bool queryEvent(void* event) const override { return event == nullptr || (*static_cast<EventHandle*>(event))->is_done(); }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    sim::record.count("event synchronised");
    (*static_cast<EventHandle*>(event))->wait();
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return ((*static_cast<EventHandle*>(second))->time() - (*static_cast<EventHandle*>(first))->time()) * 1e3;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventHandle*>(event);
  }

 private:
  static int index_of(c10::Device d) { return d.index() < 0 ? current_device : d.index(); }
  static c10::Stream spelled(int index, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, static_cast<c10::DeviceIndex>(index)), id);
  }
  static Stream& stream(const c10::Stream& s) { return device(s.device_index()).stream(s.id()); }
};

// Draws the numbers of the CPU's generator.
struct Generator : at::CPUGeneratorImpl {
  explicit Generator(int index) {
    device_ = c10::Device(KIND, static_cast<c10::DeviceIndex>(index));
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(num_devices()); }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    device(index);
    current_device = index;
  }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = getCurrentDevice();
    if (index >= 0) setCurrentDevice(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static auto* made = [] {
      auto* all = new std::vector<at::Generator>();
      for (int i = 0; i < num_devices(); i++) all->push_back(at::make_generator<Generator>(i));
      return all;
    }();
    return made->at(index < 0 ? current_device : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device : index);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    return {KIND, static_cast<c10::DeviceIndex>(device_of(data))};
  }
  bool isPinnedPtr(const void* data) const override { return pinned.holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    current_stream(impl->device().index()).wait_all();
    auto fresh = device_memory.allocate(bytes);
    size_t kept = std::min<size_t>(impl->nbytes(), bytes);
    if (kept) std::memcpy(reachable(fresh.get()), reachable(impl->data()), kept);
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};

}  // namespace sim
