// The simulated devices: an address space, streams and copy engines each; and which of them a thread uses.
//
// Addresses of a device are mapped twice: PROT_NONE where tensors point, so that a host access is a SIGSEGV (and EFAULT
// in a system call), and readable where the simulator works.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "streams.h"

namespace sim {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr size_t SPACE = size_t(1) << 42;  // virtual bytes of a device: addresses are not used again after a flush
constexpr size_t PAGE = 4096;
constexpr size_t STREAM_POOL = 32;  // as CUDA's: a stream asked for beyond that is an earlier one

struct Settings {
  std::atomic<double> copy_gbps{0}, pageable_gbps{0};  // of a copy engine; 0: as fast as memcpy
  std::atomic<int64_t> capacity{int64_t(1) << 40};     // bytes of each device
};
inline Settings settings;

// Copies one after another, each as long as its bytes take; a sleep that lasts too long does not add up.
struct Engine {
  std::mutex mutex;
  double free_at = 0;
};

struct Device {
  char* base = nullptr;    // what tensors hold
  char* shadow = nullptr;  // the same bytes, for the simulator
  Engine to_device, to_host;
  std::mutex mutex;  // of what follows
  std::deque<std::unique_ptr<Stream>> streams;
  size_t num_asked = 0;

  Device() {
    int file = static_cast<int>(syscall(SYS_memfd_create, "simulated device", 1));
    TORCH_CHECK(file >= 0 && ftruncate(file, SPACE) == 0, "simulated device: memfd: ", std::strerror(errno));
    void* hidden = mmap(nullptr, SPACE, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    void* open = mmap(nullptr, SPACE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(hidden != MAP_FAILED && open != MAP_FAILED, "simulated device: mmap: ", std::strerror(errno));
    close(file);
    base = static_cast<char*>(hidden);
    shadow = static_cast<char*>(open);
    streams.push_back(std::make_unique<Stream>());  // the default one
  }
  Stream& stream(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex);
    return *streams.at(id);
  }
  int64_t new_stream() {
    std::lock_guard<std::mutex> lock(mutex);
    if (streams.size() <= STREAM_POOL) {
      streams.push_back(std::make_unique<Stream>());
      return static_cast<int64_t>(streams.size()) - 1;
    }
    return 1 + static_cast<int64_t>(num_asked++ % STREAM_POOL);
  }
  int64_t num_streams() {
    std::lock_guard<std::mutex> lock(mutex);
    return static_cast<int64_t>(streams.size());
  }
  void wait_all() {
    for (int64_t id = 0, end = num_streams(); id < end; id++) stream(id).wait_all();
  }
  bool holds(const void* pointer) const { return pointer >= base && pointer < base + SPACE; }
};

// SIM_DEVICES of a machine, of which SIM_VISIBLE_DEVICES ("0,3") shows some, renumbered from 0; as CUDA's variable.
inline int num_devices() {
  static const int number = [] {
    const char* all = std::getenv("SIM_DEVICES");
    const char* visible = std::getenv("SIM_VISIBLE_DEVICES");
    int count = all ? std::atoi(all) : 2;
    if (visible == nullptr) return count;
    if (*visible == 0) return 0;
    return std::min<int>(count, 1 + static_cast<int>(std::count(visible, visible + std::strlen(visible), ',')));
  }();
  return number;
}

// Made on first use: neither their threads nor their memory may come from a process that was forked.
inline Device& device(int index) {
  static auto* devices = new std::deque<Device>(num_devices());
  TORCH_CHECK(
      index >= 0 && index < num_devices(), "simulated device error: invalid device ordinal ", index, " of ",
      num_devices());
  return (*devices)[index];
}

inline thread_local int current_device = 0;  // as in CUDA: a new thread starts on device 0
inline thread_local std::map<int, int64_t> current_streams;

inline int64_t current_stream_id(int index) {
  auto found = current_streams.find(index);
  return found == current_streams.end() ? 0 : found->second;
}

inline Stream& current_stream(int index) { return device(index).stream(current_stream_id(index)); }

inline int device_of(const void* pointer) {
  for (int index = 0; index < num_devices(); index++)
    if (device(index).holds(pointer)) return index;
  return -1;
}

inline void* reachable(const void* pointer) {
  if (pointer == nullptr) return nullptr;
  int index = device_of(pointer);
  TORCH_CHECK(index >= 0, "simulated device: not a pointer to its memory");
  return device(index).shadow + (static_cast<const char*>(pointer) - device(index).base);
}

}  // namespace sim
