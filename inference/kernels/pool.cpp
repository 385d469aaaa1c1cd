#include "pool.h"

#include <climits>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int kSpins = 1000;  // some 20 to 50 microseconds

void sleep_while_equal(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  if (word.load() == value) std::this_thread::yield();
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

}  // namespace

Pool::Pool(int num_threads) {
  for (int worker = 1; worker < num_threads; ++worker)
    threads_.emplace_back([this, worker] { work(worker, false); });
}

Pool::~Pool() {
  is_stopping_.store(true);
  changes_.fetch_add(1);
  wake_all(changes_);
  for (auto& thread : threads_) thread.join();
}

void Pool::execute(Program& program) {
  program_ = &program;
  open(0, 0);
  work(0, true);
}

void Pool::open(int phase, int worker) {
  const int num_phases = program_->num_phases();
  for (; phase < num_phases; ++phase) {
    const int total = program_->num_tasks(phase);
    if (total == 0) continue;
    if (total == 1) {  // nothing to share, and nobody else has a task: to tell the others would take longer than to do it
      program_->run(phase, 0, worker);
      continue;
    }
    unfinished_.store(total, std::memory_order_relaxed);
    return publish(State::make(phase, total));
  }
  publish(State::make(State::kIdle, 0));
}

void Pool::publish(uint64_t state) {
  state_.store(state);
  if (threads_.empty()) return;
  changes_.fetch_add(1);
  if (sleepers_.load() > 0) wake_all(changes_);
}

void Pool::work(int worker, bool until_idle) {
  int num_spins = 0;
  while (!is_stopping_.load(std::memory_order_relaxed)) {
    uint64_t state = state_.load(std::memory_order_acquire);
    if (State::next(state) < State::total(state)) {
      if (!state_.compare_exchange_weak(state, State::with_one_taken(state), std::memory_order_acq_rel)) continue;
      // From here until it is counted as finished, the phase cannot end: the program and its data are alive.
      const int phase = int(State::phase(state));
      program_->run(phase, int(State::next(state)), worker);
      if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) open(phase + 1, worker);
      num_spins = 0;
    } else if (until_idle && State::phase(state) == State::kIdle) {
      return;
    } else {
      wait_for_change(state, num_spins);
    }
  }
}

void Pool::wait_for_change(uint64_t seen_state, int& num_spins) {
  if (++num_spins < kSpins) {
    __builtin_ia32_pause();
    return;
  }
  num_spins = 0;
  sleepers_.fetch_add(1);
  const uint32_t seen = changes_.load();
  // Whoever changes the state after this look also changes the word, or sees a sleeper and wakes it.
  if (state_.load() == seen_state && !is_stopping_.load()) sleep_while_equal(changes_, seen);
  sleepers_.fetch_sub(1);
}
