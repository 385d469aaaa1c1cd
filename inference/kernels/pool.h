// A few threads that share the tasks of a program: phases one after another, tasks of a phase in any order.
//
// Nobody waits for a thread, only for tasks: whoever finishes the last task of a phase opens the next one, so a thread
// that the system has put aside delays the others only by the task it holds. Waiting threads spin for a moment, then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

class Program {
 public:
  virtual ~Program() = default;
  virtual int num_phases() const = 0;
  virtual int num_tasks(int phase) const = 0;  // may be none
  virtual void run(int phase, int task, int worker) = 0;
};

class Pool {
 public:
  explicit Pool(int num_threads);  // the caller of `execute` is one of them
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return int(threads_.size()) + 1; }
  void execute(Program& program);  // one at a time

 private:
  // All that a thread must know to take a task, in one word: it can only be taken while nothing of it has changed.
  struct State {
    static constexpr int kBits = 22;
    static constexpr uint64_t kMask = (1u << kBits) - 1;
    static constexpr uint64_t kIdle = (uint64_t(1) << 20) - 1;  // the phase of a program that has ended

    static uint64_t make(uint64_t phase, uint64_t total) { return phase << 2 * kBits | total; }
    static uint64_t phase(uint64_t word) { return word >> 2 * kBits; }
    static uint64_t next(uint64_t word) { return word >> kBits & kMask; }
    static uint64_t total(uint64_t word) { return word & kMask; }
    static uint64_t with_one_taken(uint64_t word) { return word + (uint64_t(1) << kBits); }
  };

  void work(int worker, bool until_idle);
  void open(int phase, int worker);  // this phase, or the next that has tasks; a lone task is done at once
  void publish(uint64_t state);
  void wait_for_change(uint64_t seen_state, int& num_spins);

  std::vector<std::thread> threads_;
  Program* program_ = nullptr;
  alignas(64) std::atomic<uint64_t> state_{State::make(State::kIdle, 0)};
  alignas(64) std::atomic<int> unfinished_{0};  // tasks of the open phase
  alignas(64) std::atomic<uint32_t> changes_{0};  // what sleepers wait on
  std::atomic<int> sleepers_{0};
  std::atomic<bool> is_stopping_{false};
};
