// The library's C interface: plain structures of sizes and pointers, filled by the caller, who keeps all memory.
// Nothing here throws; what can fail returns a status.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SAGE_API __attribute__((visibility("default")))

// Number formats of stored tensors.
enum { SAGE_STORED_BF16 = 0, SAGE_STORED_F16 = 1, SAGE_STORED_F32 = 2, SAGE_STORED_F64 = 3 };
enum { SAGE_OK = 0, SAGE_NOT_FINITE = 1, SAGE_TOO_LARGE = 2 };

// A packed matrix, as sage::Weight and sage::Coding, and what happens to its inputs before the product.
typedef struct {
  int32_t kind, is_gated;
  int64_t n, k, group;
  unsigned char* data;
  const float* bias;
  int32_t code, has_half_scales, has_zeros, has_offsets, is_unsigned;
  int64_t scale_group;
  int32_t has_one_scale;  // as sage::Input
  int32_t input_code;     // as sage::Rounding; 0: inputs stay as they are
  int64_t input_group;
  float input_scale;
  const int32_t* order;   // (k) the input that each column belongs to; null: its own
} SageLinear;

// As sage::CodedRows.
typedef struct {
  const void *codes, *scales, *zeros, *offsets, *factors, *offset_factors;
} SageCodedRows;

// weight / sqrt(mean(x²) + eps); without a weight there is no norm.
typedef struct {
  const float* weight;
  float eps;
} SageNorm;

typedef struct {
  SageNorm input_norm, query_norm, key_norm, forward_norm;
  SageLinear qkv[3];  // side by side: one, or as many as there are forms; the others have no outputs
  SageLinear output;
  SageLinear gate_up, up;  // one gated matrix, or the gate alone and what it multiplies
  SageLinear down;
  const float *cos, *sin;  // (positions, rotary_dim / 2)
  int64_t rotary_dim;
  int64_t window;  // 0: none
  float scale, soft_cap;
} SageLayer;

typedef struct {
  int64_t num_layers, hidden, vocab, num_heads, num_kv_heads, head_dim;
  const SageLayer* layers;
  SageNorm norm;
  SageLinear head;
  const void* embedding;  // (vocab, hidden) in `embedding_kind`; null: the rows of `embedding_codes`
  int32_t embedding_kind; // SAGE_STORED_BF16 or SAGE_STORED_F32
  SageLinear embedding_codes;  // without outputs: the rows of the head
  int32_t has_separate_norms, has_separate_stores;  // all rows are normed, or rotated, before any is used: to measure
} SageModel;

// As sage::KV.
typedef struct {
  int32_t kind;
  unsigned char* base;
  int64_t block_size, block, layer, kv, head, token;
  int64_t scales, layer_scales, kv_scales, head_scales;
} SageKV;

// The tokens of one step, all sequences one after another.
typedef struct {
  int64_t num_tokens, num_seqs, num_wanted, table_stride;
  const int64_t *input_ids, *positions, *slots;  // (tokens)
  const int64_t* block_tables;                   // (sequences, table_stride)
  const int64_t *query_lens, *seq_lens;          // (sequences)
  const int64_t* wanted;                         // (wanted) tokens whose logits are wanted
  float* logits;                                 // (wanted, vocab)
  // Hidden states that are wanted besides, after some layers; none if num_hidden_layers is 0.
  int64_t num_hidden_layers, num_hidden_rows;
  const int64_t* hidden_layers;                  // (hidden layers) rising, 0: the embeddings, num_layers: after the norm
  const int64_t* hidden_rows;                    // (hidden rows) tokens
  float* hidden;                                 // (hidden layers, hidden rows, hidden)
  int32_t num_threads;
} SageStep;

// The operations of a step.
enum {
  SAGE_EMBED, SAGE_NORM, SAGE_QKV, SAGE_ROPE, SAGE_ATTEND, SAGE_OUTPUT, SAGE_GATE_UP, SAGE_DOWN, SAGE_HEAD,
  SAGE_BEGIN  // no operation: when the first one began
};

// An operation, and when it ended by CLOCK_MONOTONIC; it began where the one before it ended.
typedef struct {
  int64_t operation, end_ns;
} SageLap;

// The variant that this library was built as, and 0 if the processor and the kernel let it run (else an errno).
SAGE_API const char* sage_variant(void);
SAGE_API int sage_prepare(void);

SAGE_API int64_t sage_weight_bytes(const SageLinear*);
SAGE_API int64_t sage_pack_granularity(void);

// Packs outputs [begin, begin + count) of a matrix from contiguous stored rows, rounded to the weight's kind
// (bf16 or f32). All values must be finite, stored and rounded: SAGE_NOT_FINITE, SAGE_TOO_LARGE.
SAGE_API int sage_pack(const SageLinear*, int64_t begin, int64_t count, int32_t stored, const void* rows,
                       int32_t num_threads);
// The same in int8 or int4, quantized as by sage::quantize_row; `search_scales` counts for int4 alone and is 0 or 1.
// `max_error` is raised to the largest difference between a weight and its code, in steps.
SAGE_API int sage_pack_quantized(const SageLinear*, int64_t begin, int64_t count, int32_t stored, const void* rows,
                                 float clip_ratio, float* max_error, int32_t num_threads, int32_t search_scales);
// Packs outputs of a matrix from codes: to stay codes, or as integers to be multiplied so.
SAGE_API void sage_pack_codes(const SageLinear*, int64_t begin, int64_t count, const SageCodedRows*, int32_t num_threads);
// Converts `count` stored values to SAGE_STORED_BF16 or SAGE_STORED_F32.
SAGE_API int sage_convert(int32_t stored, const void* values, int64_t count, int32_t target, void* out,
                          int32_t num_threads);

// How a row's token is chosen; 0, 0, 0 and a negative share switch them off.
typedef struct {
  double temperature;    // 0: the largest logit
  double min_p, top_k;
  double dropped_share;  // 1 - top-p
  double uniform;        // a number in [0, 1) that chooses the token, unless it has a key
} SageDrawSettings;

// Multiplies a negative logit by the factor and divides another by it, then adds to it; -infinity forbids the token.
typedef struct {
  int32_t token;
  float factor, addend;
} SageEdit;

typedef struct {
  int64_t num_rows, vocab;
  const float* logits;               // (rows, vocab)
  const SageDrawSettings* settings;  // (rows)
  const uint64_t *keys, *positions;  // (rows) whose numbers are taken, as of sage::uniform; null: those of the settings
  int64_t* tokens;                   // (rows); -1: a logit is NaN or infinite, or all are -infinity
  unsigned char* scratch;            // 64-byte aligned, for as many threads
  // What only some rows ask for. Each may be null: no row does.
  const int32_t* places;             // (rows) which row of the logits each draws from; null: one after the other
  const float* replaced;             // (any, vocab) logits to draw from instead
  const int32_t* replaced_rows;      // (rows) which of those; -1: none
  const uint32_t* masks;             // (any, (vocab + 31) / 32); bit t: token t may be drawn
  const int32_t* mask_rows;          // (rows) which of those; -1: none
  const SageEdit* edits;             // of all rows, made one after the other
  const int64_t* edit_offsets;       // (rows + 1) where each row's begin
  // Log-probabilities of the logits as they were given: the token's, its rank (how many are at least as likely),
  // those of the likeliest tokens, best first and equal ones by id, and their ids. NaN and zeros if the row is not
  // a distribution.
  const int32_t* num_top;            // (rows) how many of the likeliest; -1: no log-probabilities
  double* logprobs;                  // (rows, 2 + 2 * most_top)
  int64_t most_top;
  int32_t num_threads;
} SageDraw;

SAGE_API int64_t sage_draw_scratch_bytes(int64_t vocab, int32_t num_threads);
SAGE_API void sage_draw(const SageDraw*);

// A model keeps a copy of its table and the memory for the activations of a step.
typedef struct SageHandle SageHandle;
SAGE_API SageHandle* sage_create(const SageModel*);
SAGE_API void sage_destroy(SageHandle*);
SAGE_API void sage_set_kv(SageHandle*, const SageKV*);
// A function that steps call between layers, at most ten times per second; null: none.
SAGE_API void sage_beat_with(SageHandle*, void (*beat)(void));
// Has later steps take the time of each operation. `sage_laps` returns how many the last step has, which are kept until
// the next one; they begin with SAGE_BEGIN.
SAGE_API void sage_time_operations(SageHandle*, int32_t is_timed);
SAGE_API int64_t sage_laps(const SageHandle*, const SageLap** laps);
// SAGE_OK, or ENOMEM if there is no memory for the activations: then nothing was computed.
SAGE_API int sage_step(SageHandle*, const SageStep*);
SAGE_API int64_t sage_activation_bytes(const SageHandle*);

#ifdef __cplusplus
}
#endif
