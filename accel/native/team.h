// Threads that run one function together and take work from each other's hands.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>

namespace sage {

// One member's view of the team, handed to every kernel. All members of a team call the same sequence of
// `share` and `barrier`.
class Team {
 public:
  virtual int size() const = 0;
  virtual int rank() const = 0;

  // Runs body(begin, end) over [0, count) in pieces of one or more `grain`s, each taken by whichever member is
  // free, and returns on all members once every piece is done (it ends with a barrier). Pieces begin at multiples
  // of `grain` and shrink toward the end: large ones stream well, small ones leave nobody waiting for long.
  virtual void share(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) = 0;
  virtual void barrier() = 0;

 protected:
  ~Team() = default;
};

// A team of one member.
class Alone final : public Team {
 public:
  int size() const override { return 1; }
  int rank() const override { return 0; }
  void share(int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) override {
    if (count > 0) body(0, count);
  }
  void barrier() override {}
};

// Runs `body` on `num_threads` members, the calling thread among them: on fewer if the system gives no more
// threads. `body` throws nothing. Calls from several threads take turns.
void run_team(int num_threads, const std::function<void(Team&)>& body);

}  // namespace sage
