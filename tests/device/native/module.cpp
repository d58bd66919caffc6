// A simulated accelerator for torch: registrations, and what tests ask of it. One unit, so that it compiles once.
#include <torch/extension.h>

#include "collectives.h"
#include "operations.h"

namespace sim {

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)
REGISTER_ALLOCATOR(KIND, &device_memory)
static at::HostAllocatorRegistry<KIND> registered_pinned_memory(&pinned_memory);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("zero_", sim::zero_);
  m.impl("fill_.Scalar", sim::fill_);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  m.impl("record_stream", record_stream);
  m.impl("histc", sim::histc);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new sim::Hooks());
  m.def("device_count", &sim::num_devices);
  m.def("current_device", [] { return sim::current_device; });
  m.def("set_device", [](int index) { sim::Hooks().setCurrentDevice(static_cast<c10::DeviceIndex>(index)); });
  m.def(
      "synchronize", [](int index) { sim::GuardImpl().synchronizeDevice(static_cast<c10::DeviceIndex>(index)); },
      py::call_guard<py::gil_scoped_release>());
  m.def("register_host_memory", [](uintptr_t address, size_t bytes) {
    sim::record.count("host memory registered", int64_t(bytes));
    sim::pinned.add(reinterpret_cast<void*>(address), bytes, true);
  });
  m.def("unregister_host_memory", [](uintptr_t address) {
    sim::record.count("host memory given back");
    sim::pinned.remove(reinterpret_cast<void*>(address));
  });
  m.def("set_speed", [](double copy_gbps, double pageable_gbps) {
    sim::settings.copy_gbps = copy_gbps;
    sim::settings.pageable_gbps = pageable_gbps;
  });
  m.def("set_capacity", [](int64_t bytes) { sim::settings.capacity = bytes; });
  m.def("reset", [] { sim::record.reset(); });
  m.def("counters", [] { return sim::record.counters(); });
  m.def("timeline", [] {
    py::list found;
    for (const auto& copy : sim::record.timeline())
      found.append(
          py::make_tuple(copy.kind, copy.bytes, copy.begin, copy.end, copy.thread, copy.stream, copy.device));
    return found;
  });
  m.def("collectives", [](const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<sim::Collectives>(gloo, rank, size));
  });
}
