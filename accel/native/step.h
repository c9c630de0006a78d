// A whole forward pass in one call.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "sage.h"
#include "team.h"

namespace sage {

Weight as_weight(const SageLinear&);
CodedRows as_rows(const SageCodedRows&);

// Memory that only grows; its content does not outlive a call of `take`.
class Scratch {
 public:
  unsigned char* take(int64_t num_bytes);
  int64_t num_bytes() const { return num_bytes_; }

 private:
  struct Free {
    void operator()(unsigned char* memory) const;
  };
  std::unique_ptr<unsigned char, Free> memory_;
  int64_t num_bytes_ = 0;
};

class Model {
 public:
  explicit Model(const SageModel& table);

  void set_kv(const KV& kv) { kv_ = kv; }
  void beat_with(void (*beat)()) { beat_ = beat; }
  void time_operations(bool is_timed) { is_timed_ = is_timed; }
  const std::vector<SageLap>& laps() const { return laps_; }
  int64_t activation_bytes() const { return scratch_.num_bytes(); }

  void step(const SageStep&);

 private:
  friend class Walk;

  SageModel table_;
  std::vector<SageLayer> layers_;
  KV kv_{};
  void (*beat_)() = nullptr;
  int64_t last_beat_ns_ = 0;
  bool is_timed_ = false;
  std::vector<SageLap> laps_;  // of the last step, if it was timed
  Scratch scratch_;
};

}  // namespace sage
