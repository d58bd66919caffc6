// Operations of torch on the device: making, viewing, copying and filling tensors; all others run on the host.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorFactories.h>
#include <torch/library.h>

#include "copies.h"

namespace sim {

inline c10::Device where(std::optional<c10::Device> asked) {
  if (asked && asked->index() >= 0) return *asked;
  return {KIND, static_cast<c10::DeviceIndex>(current_device)};
}

// Under deterministic algorithms fresh memory holds NaN, as on any device of torch.
inline at::Tensor made(at::Tensor fresh) {
  if (at::globalContext().deterministicAlgorithms() && at::globalContext().deterministicFillUninitializedMemory())
    at::native::fill_empty_deterministic_(fresh);
  return fresh;
}

inline at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(where(device));
  return made(at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format));
}

inline at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(where(device));
  return made(at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype)));
}

inline const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  size_t needed = (c10::multiply_integers(size) + self.storage_offset()) * self.element_size();
  if (needed > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

inline at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
inline at::Tensor view(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }
inline at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

inline at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  auto strides = stride.data() ? stride.vec() : at::empty(size, at::kMeta).strides().vec();
  impl->set_sizes_and_strides(size, strides);
  return self;
}
inline at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  auto numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {numel}, {1});
}
inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline at::Tensor& set_nothing(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &device_memory, true), 0, {0}, {1});
}

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  c10::DeviceGuard guard(to.device().is_cpu() ? self.device() : to.device());
  transfer(self.sizes() == to.sizes() ? self : self.expand_as(to), to, non_blocking);
  return to;
}
inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (self.sizes() != to.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}
inline at::Scalar local_scalar(const at::Tensor& self) {
  auto host = at::empty(self.sizes(), self.options().device(c10::kCPU));
  copy_from(self, host, false);
  return host.item();
}

// A kernel: runs later, on the current stream.
inline at::Tensor& fill_(at::Tensor& self, const at::Scalar& value) {
  if (self.numel() == 0) return self;
  at::Tensor target = shadow_of(self);
  current_stream(self.device().index()).push([target, value]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    target.fill_(value);
  });
  return self;
}
inline at::Tensor& zero_(at::Tensor& self) { return sim::fill_(self, at::Scalar(0)); }

inline bool has_compatible_type(const at::Tensor&, const at::Tensor&) { return true; }  // `p.data = ` from the host
inline void record_stream(at::Tensor& self, at::Stream stream) {
  record.count("record_stream");
  device_memory.recordStream(self.storage().data_ptr(), stream);
}

// Convolutions have no fallback of torch's.
inline at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  Quiet quietly;
  auto host_bias = bias && bias->defined() ? std::make_optional(bias->cpu()) : std::nullopt;
  auto found = at::convolution(
      input.cpu(), weight.cpu(), host_bias, stride, padding, dilation, transposed, output_padding, groups);
  return found.to(input.device());
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  Quiet quietly;
  std::vector<int64_t> bias_size{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      gradient.cpu(), input.cpu(), weight.cpu(), bias_size, stride, padding, dilation, transposed, output_padding,
      groups, mask);
  auto there = [&](const at::Tensor& t) { return t.defined() ? t.to(input.device()) : t; };
  return {there(of_input), there(of_weight), there(of_bias)};
}

// Of integers too, as CUDA and unlike the CPU.
inline at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  Quiet quietly;
  return at::histc(self.cpu().to(at::kFloat), bins, low, high).to(self.options());
}

// As CUDA: host tensors of no dimension are numbers, others are a mistake, but for indices.
inline void refuse_host_tensors(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const std::string& name = op.schema().name();
  if (name.find("index") != std::string::npos || name.find("copy") != std::string::npos) return;
  auto check = [&](const at::Tensor& t) {
    TORCH_CHECK(
        !t.defined() || !t.device().is_cpu() || t.dim() == 0,
        "Expected all tensors to be on the same device, but found at least two devices, sim and cpu! (", name, ")");
  };
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) check(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector()) check(t);
  }
}

// Waits for its stream and runs at once: a race of such an operation with copies on other streams need not show.
inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_host_tensors(op, *stack);
  Quiet quietly;
  at::native::cpu_fallback(op, stack);
}

}  // namespace sim
