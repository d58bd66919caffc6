// What happened on the simulated devices: counters by name, and a timeline of copies.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace sim {

inline double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

inline int64_t this_thread() { return syscall(SYS_gettid); }

struct Copy {
  std::string kind;
  int64_t bytes;
  double begin, end;  // seconds of the steady clock, which is Python's time.perf_counter on Linux
  int64_t thread, stream;
  int device;
};

class Record {
 public:
  void count(const std::string& name, int64_t bytes = 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& [number, sum] = counters_[name];
    number++;
    sum += bytes;
  }
  void add(Copy copy) {
    std::lock_guard<std::mutex> lock(mutex_);
    timeline_.push_back(std::move(copy));
  }
  void reset() {
    std::lock_guard<std::mutex> lock(mutex_);
    counters_.clear();
    timeline_.clear();
  }
  std::map<std::string, std::pair<int64_t, int64_t>> counters() {
    std::lock_guard<std::mutex> lock(mutex_);
    return counters_;
  }
  std::vector<Copy> timeline() {
    std::lock_guard<std::mutex> lock(mutex_);
    return timeline_;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::pair<int64_t, int64_t>> counters_;  // name -> (times, bytes)
  std::vector<Copy> timeline_;
};

inline Record record;

// Nonzero inside the simulator's own work (an operation that runs on the host, a collective): what it copies is neither
// counted nor slowed down.
inline thread_local int quiet = 0;

struct Quiet {
  Quiet() { quiet++; }
  ~Quiet() { quiet--; }
};

}  // namespace sim
