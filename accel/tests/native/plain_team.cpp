// A team for tests of single kernels: threads that are started for each call and spin at barriers.
#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <thread>
#include <vector>

#include "team.h"

namespace sage {
namespace {

struct Shared {
  int size;
  std::atomic<int64_t> next{0};
  std::atomic<int> arrived{0};
  std::atomic<int> phase{0};
};

class PlainTeam final : public Team {
 public:
  PlainTeam(Shared& shared, int rank) : shared_(shared), rank_(rank) {}
  int size() const override { return shared_.size; }
  int rank() const override { return rank_; }
  void share(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) override {
    for (int64_t begin; (begin = shared_.next.fetch_add(grain)) < count;) body(begin, std::min(count, begin + grain));
    barrier();
  }
  void barrier() override {
    const int phase = shared_.phase.load();
    if (shared_.arrived.fetch_add(1) + 1 == shared_.size) {
      shared_.next = 0;
      shared_.arrived = 0;
      shared_.phase = phase + 1;
      return;
    }
    for (int spins = 0; shared_.phase.load() == phase; ++spins) {
      if (spins < 20000) _mm_pause(); else sched_yield();
    }
  }

 private:
  Shared& shared_;
  int rank_;
};

}  // namespace

void run_team(int num_threads, const std::function<void(Team&)>& body) {
  Shared shared{num_threads};
  std::vector<std::thread> threads;
  for (int rank = 1; rank < num_threads; ++rank) {
    threads.emplace_back([&, rank] { PlainTeam team(shared, rank); body(team); });
  }
  PlainTeam team(shared, 0);
  body(team);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace sage
