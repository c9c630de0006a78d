// One pool of threads for the process. Threads are started when a team first needs them and kept; while nothing
// runs they sleep in the kernel.
#include "team.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace sage {
namespace {

// Longer than the phases of a small step are uneven, shorter than a time slice: a thread that waits for a
// preempted one must give up its core soon, because the preempted thread may need just that core.
constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr int kPausesBetweenLooks = 16;

// Asks for turns of this length on the processor, without a larger part of it: beside other processes a thread that others
// wait for then comes back sooner. Kernels before Linux 6.12 take no notice.
constexpr uint64_t kTurnNs = 300'000;

void ask_for_short_turns() {
  struct {  // sched_attr of linux/sched/types.h, which glibc's sched.h is at odds with
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0 || attributes.policy != SCHED_OTHER) return;
  attributes.runtime = kTurnNs;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

// A counter that threads wait on: they spin briefly, then sleep.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  // Waits until the value is no longer `seen`.
  void wait(uint32_t seen) {
    if (spin(seen)) return;
    // Either `raise` sees this sleeper, or the kernel sees the new value and does not let it sleep.
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (value_.load(std::memory_order_seq_cst) == seen) futex(FUTEX_WAIT_PRIVATE, seen);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

  void raise() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(FUTEX_WAKE_PRIVATE, INT32_MAX);
  }

 private:
  bool spin(uint32_t seen) const {
    const auto end = std::chrono::steady_clock::now() + kSpinTime;
    do {
      for (int i = 0; i < kPausesBetweenLooks; i++) {
        if (value() != seen) return true;
        _mm_pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }

  void futex(int operation, uint32_t argument) {
    static_assert(sizeof(value_) == sizeof(uint32_t));
    syscall(SYS_futex, &value_, operation, argument, nullptr, nullptr, 0);
  }

  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

// What the members of the running team have in common. Each on a cache line of its own: all of them are written
// while others read.
struct Meeting {
  alignas(64) std::atomic<int64_t> next{0};  // first item of the current `share` that nobody has taken
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) Signal released;
};

class Member final : public Team {
 public:
  Member(Meeting& meeting, int size, int rank) : meeting_(meeting), size_(size), rank_(rank) {}

  int size() const override { return size_; }
  int rank() const override { return rank_; }

  void share(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) override {
    int64_t begin = meeting_.next.load(std::memory_order_relaxed);
    while (begin < count) {
      const int64_t grains = (count - begin + grain - 1) / grain;
      const int64_t end = std::min(count, begin + std::max<int64_t>(1, grains / (2 * size_)) * grain);
      // The barrier orders what the pieces read and write; taking one needs no order of its own.
      if (!meeting_.next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      body(begin, end);
      begin = meeting_.next.load(std::memory_order_relaxed);
    }
    barrier();
  }

  void barrier() override {
    const uint32_t seen = meeting_.released.value();
    if (meeting_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) {
      meeting_.released.wait(seen);
      return;
    }
    meeting_.arrived.store(0, std::memory_order_relaxed);
    meeting_.next.store(0, std::memory_order_relaxed);
    meeting_.released.raise();
  }

 private:
  Meeting& meeting_;
  const int size_, rank_;
};

class Pool {
 public:
  explicit Pool(pid_t process) : process(process) {}

  void run(int num_threads, const std::function<void(Team&)>& body) {
    const std::lock_guard<std::mutex> lock(turn_);
    static thread_local const bool has_asked = (ask_for_short_turns(), true);
    static_cast<void>(has_asked);
    grow(num_threads - 1);
    size_ = std::min(num_threads, static_cast<int>(workers_.size()) + 1);
    body_ = &body;
    control_word_ = _mm_getcsr();
    for (int i = 0; i + 1 < size_; i++) workers_[i].called.raise();
    take_part(0);
  }

  const pid_t process;

 private:
  struct Worker {
    alignas(64) Signal called;
  };

  // Everything that `run` sets stays as it is until all members have left by the last barrier.
  void take_part(int rank) {
    Member member(meeting_, size_, rank);
    (*body_)(member);
    member.barrier();
  }

  void work(Worker& self, int rank) {
    ask_for_short_turns();
    for (uint32_t seen = 0;; seen++) {
      self.called.wait(seen);
      _mm_setcsr(control_word_);  // rounding and denormals as in the caller: the same bits on every thread
      take_part(rank);
    }
  }

  void grow(int num_workers) {
    if (static_cast<int>(workers_.size()) >= num_workers) return;
    // Signals are for the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (static_cast<int>(workers_.size()) < num_workers && start_worker()) {}
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  bool start_worker() {
    Worker& worker = workers_.emplace_back();
    try {
      const int rank = static_cast<int>(workers_.size());
      std::thread([this, &worker, rank] { work(worker, rank); }).detach();
    } catch (const std::system_error&) {
      workers_.pop_back();
      return false;
    }
    return true;
  }

  std::mutex turn_;
  std::deque<Worker> workers_;  // a deque: workers stay where they are while it grows
  Meeting meeting_;
  int size_ = 1;
  const std::function<void(Team&)>* body_ = nullptr;
  unsigned control_word_ = 0;
};

// The pool is never destroyed: at exit its threads may still sleep in it. A forked child has a copy of it without
// threads and with whatever state they had left, and makes a pool of its own.
Pool& pool_of_this_process() {
  static std::atomic<Pool*> current{nullptr};
  Pool* pool = current.load(std::memory_order_acquire);
  const pid_t process = getpid();
  while (pool == nullptr || pool->process != process) {
    Pool* fresh = new Pool(process);
    if (current.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;
  }
  return *pool;
}

}  // namespace

void run_team(int num_threads, const std::function<void(Team&)>& body) {
  if (num_threads > 1) return pool_of_this_process().run(num_threads, body);
  Alone alone;
  body(alone);
}

}  // namespace sage
