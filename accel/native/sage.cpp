#include "sage.h"

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>

#include "attention.h"
#include "linear.h"
#include "load.h"
#include "sampling.h"
#include "step.h"

struct SageHandle {
  sage::Model model;
};

const char* sage_variant(void) {
#if defined(__AMX_TILE__)
  return "amx";
#elif defined(__AVX512BF16__)
  return "avx512";
#else
  return "avx2";
#endif
}

int sage_prepare(void) {
#if defined(__AMX_TILE__)
  // The kernel saves the tiles' registers only for processes that have asked for it.
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return errno;
#endif
  return 0;
}

int64_t sage_weight_bytes(const SageLinear* linear) { return sage::weight_bytes(sage::as_weight(*linear)); }

int64_t sage_pack_granularity(void) { return sage::pack_granularity(); }

int sage_pack(const SageLinear* linear, int64_t begin, int64_t count, int32_t stored, const void* rows,
              int32_t num_threads) {
  return static_cast<int>(sage::pack_rows(sage::as_weight(*linear), begin, count, static_cast<sage::Stored>(stored), rows,
                                          num_threads));
}

int sage_pack_quantized(const SageLinear* linear, int64_t begin, int64_t count, int32_t stored, const void* rows,
                        float clip_ratio, float* max_error, int32_t num_threads, int32_t search_scales) {
  return static_cast<int>(sage::quantize_rows(sage::as_weight(*linear), begin, count, static_cast<sage::Stored>(stored),
                                              rows, clip_ratio, max_error, num_threads, search_scales != 0));
}

void sage_pack_codes(const SageLinear* linear, int64_t begin, int64_t count, const SageCodedRows* rows, int32_t num_threads) {
  sage::pack_coded_rows(sage::as_weight(*linear), begin, count, sage::as_rows(*rows), num_threads);
}

int sage_convert(int32_t stored, const void* values, int64_t count, int32_t target, void* out, int32_t num_threads) {
  return static_cast<int>(sage::convert(static_cast<sage::Stored>(stored), values, count,
                                        static_cast<sage::Stored>(target), out, num_threads));
}

int64_t sage_draw_scratch_bytes(int64_t vocab, int32_t num_threads) {
  return sage::draw_scratch_bytes(vocab, num_threads);
}

void sage_draw(const SageDraw* draw) {
  sage::run_team(draw->num_threads, [&](sage::Team& team) { sage::draw_tokens(team, *draw); });
}

SageHandle* sage_create(const SageModel* table) { return new SageHandle{sage::Model(*table)}; }

void sage_destroy(SageHandle* handle) { delete handle; }

void sage_set_kv(SageHandle* handle, const SageKV* kv) {
  handle->model.set_kv({static_cast<sage::KVKind>(kv->kind), kv->base, kv->block_size, kv->block, kv->layer, kv->kv,
                        kv->head, kv->token, kv->scales, kv->layer_scales, kv->kv_scales, kv->head_scales});
}

void sage_beat_with(SageHandle* handle, void (*beat)(void)) { handle->model.beat_with(beat); }

void sage_time_operations(SageHandle* handle, int32_t is_timed) { handle->model.time_operations(is_timed != 0); }

int64_t sage_laps(const SageHandle* handle, const SageLap** laps) {
  *laps = handle->model.laps().data();
  return handle->model.laps().size();
}

int sage_step(SageHandle* handle, const SageStep* step) {
  try {
    handle->model.step(*step);
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  }
  return SAGE_OK;
}

int64_t sage_activation_bytes(const SageHandle* handle) { return handle->model.activation_bytes(); }
