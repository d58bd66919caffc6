// Allocators: of device memory, which caches by stream as CUDA's does, and of pinned host memory.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/llvmMathExtras.h>

#include <set>
#include <shared_mutex>

#include "device.h"

namespace sim {

struct Block {
  char* pointer;
  size_t size;
  size_t asked;  // size is rounded up
  int device;
  int64_t stream;                  // that it was allocated on
  std::set<int64_t> also_used_by;  // streams that record_stream named
};

// A freed block goes to whoever asks next on the stream that it was allocated on: at once, which is right there and a
// race on any other stream. One that other streams use by record_stream waits until they are done with it.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    int index = current_device;
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(KIND, index)};
    size_t size = (bytes + 511) / 512 * 512;
    int64_t stream = current_stream_id(index);
    State& state = of(index);
    std::lock_guard<std::mutex> lock(state.mutex);
    state.reclaim(index);
    char* pointer = state.take(stream, size);
    if (pointer == nullptr) pointer = fresh(state, index, size);
    state.allocated += size;
    state.peak = std::max(state.peak, state.allocated);
    state.asked += bytes;
    state.asked_peak = std::max(state.asked_peak, state.asked);
    state.reserved_peak = std::max(state.reserved_peak, state.reserved());
    return {pointer, new Block{pointer, size, bytes, index, stream, {}}, &release, c10::Device(KIND, index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(reachable(to), reachable(from), n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (int index = 0; index < num_devices(); index++) {
      std::lock_guard<std::mutex> lock(of(index).mutex);
      of(index).flush(index);
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    auto* block = static_cast<Block*>(data.get_context());
    if (block == nullptr || block->stream == stream.id()) return;
    std::lock_guard<std::mutex> lock(of(block->device).mutex);
    block->also_used_by.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    State& state = of(index);
    std::lock_guard<std::mutex> lock(state.mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = state.allocated;
    stats.allocated_bytes[0].peak = state.peak;
    stats.requested_bytes[0].current = state.asked;
    stats.requested_bytes[0].peak = state.asked_peak;
    stats.reserved_bytes[0].current = state.reserved();
    stats.reserved_bytes[0].peak = state.reserved_peak;
    stats.num_ooms = state.num_ooms;
    stats.num_alloc_retries = state.num_flushes;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    State& state = of(index);
    std::lock_guard<std::mutex> lock(state.mutex);
    state.peak = state.allocated;
    state.asked_peak = state.asked;
    state.reserved_peak = state.reserved();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    State& state = of(index);
    std::lock_guard<std::mutex> lock(state.mutex);
    return {settings.capacity - state.reserved(), settings.capacity};
  }

 private:
  struct Waiting {
    Block block;
    std::map<int64_t, uint64_t> tasks;  // stream -> number of its last task when the block was freed
  };
  struct State {
    std::mutex mutex;
    size_t top = 512;
    int64_t allocated = 0, peak = 0, asked = 0, asked_peak = 0, cached = 0, reserved_peak = 0;
    int64_t num_ooms = 0, num_flushes = 0;
    std::map<std::pair<int64_t, size_t>, std::vector<char*>> free_blocks;  // by stream and size
    std::deque<Waiting> waiting;

    int64_t reserved() const { return allocated + cached; }
    char* take(int64_t stream, size_t size) {
      auto found = free_blocks.find({stream, size});
      if (found == free_blocks.end() || found->second.empty()) return nullptr;
      char* pointer = found->second.back();
      found->second.pop_back();
      cached -= size;
      return pointer;
    }
    void reclaim(int index) {
      std::deque<Waiting> still;
      for (auto& one : waiting) {
        bool done = std::all_of(one.tasks.begin(), one.tasks.end(), [&](const auto& task) {
          return device(index).stream(task.first).is_done(task.second);
        });
        if (done)
          free_blocks[{one.block.stream, one.block.size}].push_back(one.block.pointer);
        else
          still.push_back(one);
      }
      waiting.swap(still);
    }
    void flush(int index) {  // as cudaFree, it waits for the device first
      device(index).wait_all();
      reclaim(index);
      for (auto& [key, pointers] : free_blocks)
        for (char* pointer : pointers) {  // whole pages only: neighbours of a block are alive
          size_t first = pointer - device(index).base;
          size_t begin = (first + PAGE - 1) / PAGE * PAGE, end = (first + key.second) / PAGE * PAGE;
          if (begin < end) madvise(device(index).shadow + begin, end - begin, MADV_REMOVE);
        }
      free_blocks.clear();
      cached = 0;
    }
  };

  static State& of(int index) {
    static auto* states = new std::deque<State>(num_devices());
    device(index);  // complains of an index that there is not
    return (*states)[index];
  }
  static char* fresh(State& state, int index, size_t size) {
    if (state.reserved() + int64_t(size) > settings.capacity) {
      state.num_flushes++;
      state.flush(index);
    }
    if (state.reserved() + int64_t(size) > settings.capacity) {
      state.num_ooms++;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "simulated device out of memory. Tried to allocate ", size, " bytes. Device ", index,
          " of ", settings.capacity.load(), " bytes has ", state.allocated, " allocated.");
    }
    char* pointer = device(index).base + state.top;
    state.top += size;
    TORCH_CHECK(state.top < SPACE, "simulated device: its address space is used up");
    return pointer;
  }
  static void release(void* context) {
    if (context == nullptr) return;
    std::unique_ptr<Block> block(static_cast<Block*>(context));
    State& state = of(block->device);
    std::lock_guard<std::mutex> lock(state.mutex);
    state.allocated -= block->size;
    state.asked -= block->asked;
    state.cached += block->size;
    Waiting waiting{*block, {}};
    for (int64_t stream : block->also_used_by) waiting.tasks[stream] = device(block->device).stream(stream).last();
    state.waiting.push_back(std::move(waiting));
    state.reclaim(block->device);
  }
};
inline DeviceMemory device_memory;

// Page-locked host memory. Nothing is locked; it is known to be pinned, which decides how it is copied. What was
// registered is its owner's: nobody keeps it while a copy is under way.
class PinnedRanges {
 public:
  void add(const void* begin, size_t size, bool is_registered) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    ranges_[static_cast<const char*>(begin)] = {static_cast<const char*>(begin) + size, is_registered};
  }
  void remove(const void* begin) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    TORCH_CHECK(ranges_.erase(static_cast<const char*>(begin)) == 1, "simulated device: that memory is not registered");
  }
  bool holds(const void* pointer) { return find(pointer).end != nullptr; }
  bool is_registered(const void* pointer) { return find(pointer).is_registered; }

 private:
  struct Range {
    const char* end = nullptr;
    bool is_registered = false;
  };
  Range find(const void* pointer) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    auto after = ranges_.upper_bound(static_cast<const char*>(pointer));
    return after != ranges_.begin() && std::prev(after)->second.end > pointer ? std::prev(after)->second : Range{};
  }
  std::shared_mutex mutex_;
  std::map<const char*, Range> ranges_;  // by begin
};
inline PinnedRanges pinned;

// As torch's: blocks of a power of two, cached for ever. A copy under way holds its tensor, so none is reused too early.
struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    size_t size = c10::llvm::PowerOf2Ceil(bytes);
    record.count("pinned memory asked for", int64_t(bytes));
    void* pointer = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex);
      auto& cached = blocks[size];
      if (!cached.empty()) {
        pointer = cached.back();
        cached.pop_back();
      }
    }
    if (pointer == nullptr) {
      TORCH_CHECK(posix_memalign(&pointer, PAGE, size) == 0, "simulated device: no host memory");
      pinned.add(pointer, size, false);
      record.count("pinned memory made", int64_t(size));
    }
    return {pointer, new std::pair<void*, size_t>(pointer, size), &release, c10::Device(c10::kCPU)};
  }
  static void release(void* context) {
    if (context == nullptr) return;
    std::unique_ptr<std::pair<void*, size_t>> block(static_cast<std::pair<void*, size_t>*>(context));
    std::lock_guard<std::mutex> lock(mutex);
    blocks[block->second].push_back(block->first);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  static inline std::mutex mutex;
  static inline std::map<size_t, std::vector<void*>> blocks;
};
inline PinnedMemory pinned_memory;

}  // namespace sim
