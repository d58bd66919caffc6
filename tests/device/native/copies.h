// Copies between host and device, by CUDA's rules: pinned and non-blocking ones happen later, all others block.
#pragma once

#include <ATen/ATen.h>

#include "guard.h"

namespace sim {

// A host tensor on the device's bytes.
inline at::Tensor shadow_of(const at::Tensor& t) {
  auto options = at::TensorOptions().dtype(t.dtype()).device(c10::kCPU);
  return at::from_blob(reachable(t.data_ptr()), t.sizes(), t.strides(), options);
}

// Sleeps first and takes the bytes last: a buffer that is written to too early shows.
inline void run_copy(Copy copy, void* to, const void* from, double gbps, Engine& engine, double issued, bool is_noted) {
  std::lock_guard<std::mutex> lock(engine.mutex);
  copy.begin = gbps > 0 && issued < engine.free_at ? engine.free_at : now();
  copy.end = copy.begin + (gbps > 0 ? copy.bytes / (gbps * 1e9) : 0);
  double rest = copy.end - now() - copy.bytes / 8e9;
  if (rest > 0) std::this_thread::sleep_for(std::chrono::duration<double>(rest));
  std::memcpy(to, from, copy.bytes);
  if (gbps <= 0) copy.end = now();
  engine.free_at = copy.end;
  if (is_noted) record.add(std::move(copy));
}

// Both contiguous, of one dtype and size.
inline void copy_bytes(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return;
  bool to_device = from.device().is_cpu(), is_noted = quiet == 0;
  const at::Tensor& host = to_device ? from : to;
  int index = (to_device ? to : from).device().index();
  bool is_pinned = pinned.holds(host.data_ptr()), is_later = is_pinned && non_blocking;
  std::string kind = std::string(to_device ? "to device, " : "to host, ") + (is_pinned ? "pinned" : "pageable");
  if (is_pinned && !is_later) kind += ", blocking";
  double gbps = quiet ? 0.0 : (is_pinned ? settings.copy_gbps : settings.pageable_gbps).load();
  if (is_noted) record.count(kind, int64_t(to.nbytes()));
  void* target = to_device ? reachable(to.data_ptr()) : to.data_ptr();
  const void* source = to_device ? from.data_ptr() : reachable(from.data_ptr());
  Engine& engine = to_device ? device(index).to_device : device(index).to_host;
  Copy copy{kind, int64_t(to.nbytes()), 0, 0, this_thread(), current_stream_id(index), index};
  c10::Storage held;  // as torch's host allocator holds what copies still read, if it is its own
  if (!pinned.is_registered(host.data_ptr())) held = host.storage();
  Stream& stream = current_stream(index);
  double issued = now();
  auto number = stream.push([=, &engine] {
    (void)held;
    run_copy(copy, target, source, gbps, engine, issued, is_noted);
  });
  if (!is_later) stream.wait(number);
}

// A kernel: runs later, on the current stream of the device.
inline void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  if (from.device() != to.device()) current_stream(from.device().index()).wait_all();
  if (!quiet) record.count("on device", int64_t(to.nbytes()));
  at::Tensor source = shadow_of(from), target = shadow_of(to);
  current_stream(to.device().index()).push([source, target]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    target.copy_(source);
  });
}

// As `copy_kernel_cuda` of torch: what is not one run of one dtype goes through temporaries, on the host for blocking
// copies and on the device for others.
inline void transfer(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return;
  bool from_host = from.device().is_cpu();
  if (!from_host && !to.device().is_cpu()) return copy_on_device(from, to);
  bool same = from.scalar_type() == to.scalar_type();
  if (same && from.is_contiguous() && to.is_contiguous() && from.sizes() == to.sizes())
    return copy_bytes(from, to, non_blocking);
  bool convert_at_source = from_host != non_blocking;
  at::Tensor target, source;
  auto contiguous = c10::MemoryFormat::Contiguous;
  if (convert_at_source) {
    target = to.is_contiguous() ? to : at::empty_like(to, to.options(), contiguous);
    source = from.to(to.scalar_type()).expand_as(to).contiguous();
  } else {
    target = to.is_contiguous() && same ? to : at::empty_like(to, to.options().dtype(from.scalar_type()), contiguous);
    source = from.expand_as(to).contiguous();
  }
  if (!quiet && !source.is_same(from) && from_host) record.count("host temporary", int64_t(source.nbytes()));
  copy_bytes(source, target, non_blocking);
  if (!target.is_same(to)) to.copy_(target, non_blocking);
}

}  // namespace sim
