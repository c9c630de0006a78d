// Runs teams as a step does and checks what their phases did. Ends with status 0, or says what was wrong.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "team.h"

using sage::Team;

static void check(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::_Exit(1);
}

// Each phase reads what another member may have written in the phase before.
static void walk_through_phases(int num_threads, int num_phases, int64_t count, int64_t grain) {
  std::vector<int64_t> items(count, 0), before(count, 0);
  sage::run_team(num_threads, [&](Team& team) {
    check(team.rank() >= 0 && team.rank() < team.size(), "a rank is below the size");
    for (int phase = 0; phase < num_phases; phase++) {
      team.share(count, grain, [&](int64_t begin, int64_t end) {
        check(begin % grain == 0 && begin < end && end <= count, "a piece begins at a multiple of the grain");
        for (int64_t i = begin; i < end; i++) items[i] = before[count - 1 - i] + 1;
      });
      if (team.rank() == 0) before = items;
      team.barrier();
    }
  });
  for (int64_t value : items) check(value == num_phases, "each phase runs each item once");
}

static void step_in_a_child() {
  walk_through_phases(2, 3, 10, 1);
  const pid_t child = fork();
  if (child == 0) {
    walk_through_phases(3, 20, 100, 1);
    std::_Exit(0);
  }
  int status = 0;
  check(waitpid(child, &status, 0) == child && status == 0, "a forked child runs teams");
}

static void step_beside_another_thread() {
  std::thread other([] { for (int i = 0; i < 50; i++) walk_through_phases(2, 5, 64, 4); });
  for (int i = 0; i < 50; i++) walk_through_phases(3, 5, 64, 4);
  other.join();
}

static void sleep_while_nothing_runs() {
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const std::clock_t before = std::clock();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  check(std::clock() - before < CLOCKS_PER_SEC / 100, "idle threads use no processor time");
}

int main(int argc, char**) {
  for (int num_threads : {1, 2, 3, 4})
    for (int64_t count : {0, 1, 7, 1000})
      for (int64_t grain : {1, 3, 64}) walk_through_phases(num_threads, 20, count, grain);
  step_beside_another_thread();
  sleep_while_nothing_runs();
  if (argc == 1) step_in_a_child();  // the thread sanitizer cannot follow a fork that starts threads
}
