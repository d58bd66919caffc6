// Streams are threads that run one task after another; events are marks in them.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "record.h"

namespace sim {

class Stream {
 public:
  Stream() {
    std::thread([this] { run(); }).detach();
  }
  // Returns the number of the task, by which `wait` and `is_done` know it.
  uint64_t push(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
    return ++pushed_;
  }
  uint64_t last() {
    std::lock_guard<std::mutex> lock(mutex_);
    return pushed_;
  }
  bool is_done(uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= number;
  }
  void wait(uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= number; });
  }
  void wait_all() { wait(last()); }

 private:
  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
      task = nullptr;  // what it held is free before it counts as done
      std::lock_guard<std::mutex> lock(mutex_);
      ++done_;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  uint64_t pushed_ = 0, done_ = 0;
};

// Each recording is a version; who waits, waits for the version of that moment.
class Event {
 public:
  static void record(const std::shared_ptr<Event>& event, Stream& stream) {
    uint64_t version;
    {
      std::lock_guard<std::mutex> lock(event->mutex_);
      version = ++event->version_;
    }
    stream.push([event, version] {
      std::lock_guard<std::mutex> lock(event->mutex_);
      event->done_ = std::max(event->done_, version);
      event->time_ = now();
      event->changed_.notify_all();
    });
  }
  static void block(const std::shared_ptr<Event>& event, Stream& stream) {
    uint64_t version;
    {
      std::lock_guard<std::mutex> lock(event->mutex_);
      version = event->version_;
    }
    stream.push([event, version] { event->wait_for(version); });
  }
  bool is_done() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= version_;
  }
  void wait() {
    uint64_t version;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      version = version_;
    }
    wait_for(version);
  }
  double time() {
    std::lock_guard<std::mutex> lock(mutex_);
    return time_;
  }

 private:
  void wait_for(uint64_t version) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= version; });
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t version_ = 0, done_ = 0;
  double time_ = 0;
};
using EventHandle = std::shared_ptr<Event>;

}  // namespace sim
