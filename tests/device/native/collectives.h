// Collectives that take device tensors only, as NCCL does, and move them through gloo.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "copies.h"

namespace sim {

// A collective is over when its call returns.
struct Done : c10d::Work {
  explicit Done(c10d::OpType type) : Work(-1, type) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future_->markCompleted(c10::List<at::Tensor>());
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds = c10d::kUnsetTimeout) override { return true; }
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

class Collectives : public c10d::Backend {
 public:
  Collectives(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "simccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void eagerConnectSingleDevice(at::Device) override {}

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return in_place(tensors, c10d::OpType::BROADCAST, [&](Tensors& t) { gloo_->broadcast(t, o)->wait(); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return in_place(tensors, c10d::OpType::ALLREDUCE, [&](Tensors& t) { gloo_->allreduce(t, o)->wait(); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      allreduce(one, o);
    }
    return done(c10d::OpType::ALLREDUCE_COALESCED);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    return in_place(tensors, c10d::OpType::REDUCE, [&](Tensors& t) { gloo_->reduce(t, o)->wait(); });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    Quiet quietly;
    Tensors in = host(inputs);
    std::vector<Tensors> out{host(outputs[0])};
    gloo_->allgather(out, in, o)->wait();
    back(out[0], outputs[0]);
    return done(c10d::OpType::ALLGATHER);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& o) override {
    Quiet quietly;
    at::Tensor in = host(input), out = host(output);
    gloo_->_allgather_base(out, in, o)->wait();
    output.copy_(out.view_as(output));
    record.count("collective", int64_t(output.nbytes()));
    return done(c10d::OpType::_ALLGATHER_BASE);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    for (size_t i = 0; i < outputs.size(); i++) _allgather_base(outputs[i], inputs[i], o);
    return done(c10d::OpType::COALESCED);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& o) override {
    Quiet quietly;  // gloo has none: all ranks reduce all
    Tensors all{host(input)};
    c10d::AllreduceOptions options;
    bool is_average = o.reduceOp == c10d::ReduceOp::AVG;
    options.reduceOp = is_average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : o.reduceOp;
    gloo_->allreduce(all, options)->wait();
    if (is_average) all[0].div_(size_);
    output.copy_(all[0].view(-1).narrow(0, rank_ * output.numel(), output.numel()).view_as(output));
    record.count("collective", int64_t(input.nbytes()));
    return done(c10d::OpType::_REDUCE_SCATTER_BASE);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& o) override {
    for (size_t i = 0; i < outputs.size(); i++) _reduce_scatter_base(outputs[i], inputs[i], o);
    return done(c10d::OpType::COALESCED);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    Quiet quietly;
    Tensors t = host(tensors);
    gloo_->send(t, to, tag)->wait();
    return done(c10d::OpType::SEND);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return in_place(tensors, c10d::OpType::RECV, [&](Tensors& t) { gloo_->recv(t, from, tag)->wait(); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    c10d::BarrierOptions plain;
    plain.timeout = o.timeout;
    gloo_->barrier(plain)->wait();
    return done(c10d::OpType::BARRIER);
  }

 private:
  static WorkPtr done(c10d::OpType type) { return c10::make_intrusive<Done>(type); }
  static at::Tensor host(const at::Tensor& t) {
    TORCH_CHECK(t.device().type() == KIND, "simccl: No backend type associated with device type ", t.device().type());
    return t.to(c10::kCPU).contiguous();
  }
  static Tensors host(const Tensors& tensors) {
    Tensors out;
    for (auto& t : tensors) out.push_back(host(t));
    return out;
  }
  static void back(const Tensors& from, Tensors& to) {
    for (size_t i = 0; i < to.size(); i++) {
      to[i].copy_(from[i]);
      record.count("collective", int64_t(to[i].nbytes()));
    }
  }
  template <typename F>
  WorkPtr in_place(Tensors& tensors, c10d::OpType type, F run) {
    Quiet quietly;
    Tensors t = host(tensors);
    run(t);
    back(t, tensors);
    return done(type);
  }
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace sim
