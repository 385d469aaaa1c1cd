// The C interface of the CPU step, as `loader.py` calls it through ctypes. Both sides list the fields in the same order.
//
// A model is made once (create, norms, matrices, rope, finish), then steps run on it, one at a time. Functions that can
// refuse return a message, or null; the message is a constant and must not be freed.
#pragma once

#include <cstdint>

#define TATKAL_API extern "C" __attribute__((visibility("default")))

// Rises with every change of this interface or of the order of a sum: it is part of the engine's fingerprint.
constexpr int kInterfaceVersion = 1;

// How a matrix is stored, and, of the first three, what the cache holds.
enum Format : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt4 = 3, kInt8 = 4 };

// What the processor can do; a higher one includes the lower ones.
enum Isa : int32_t { kNone = 0, kAvx512Vnni = 1, kAvx512Bf16 = 2 };

enum Role : int32_t { kQuery, kKey, kValue, kAttentionOutput, kGate, kUp, kDown, kEmbedding, kHead };

enum Norm : int32_t { kAttentionNorm, kMlpNorm, kFinalNorm };

struct TatkalShape {
  int32_t vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim;
  int32_t block_size;     // tokens of a KV block
  int32_t kv_format;      // one of the float formats
  int32_t num_positions;  // rows of the rotary table
  float rms_norm_eps;
};

// One matrix [rows, columns] as an artifact holds it, row-major.
struct TatkalMatrix {
  int32_t format, rows, columns;
  int32_t stored_group;  // columns that share a scale in the file; 0 for floats
  int32_t group;         // columns that share a scale in memory: a divisor of stored_group, equal for one input
  const void* values;    // floats, int4 codes two a byte, or int8 codes
  const uint16_t* scale;    // [rows, columns / stored_group] float16, integers only
  const uint16_t* minimum;  // likewise, int4 only
};

// The tokens of a step: spans of neighbours of one sequence, one after another.
struct TatkalStep {
  int32_t num_tokens, num_spans, num_logits;
  int32_t num_blocks;               // of the cache
  const int32_t* token_ids;         // [num_tokens]
  const int32_t* span_starts;       // [num_spans] position of the first token
  const int32_t* span_lengths;      // [num_spans] tokens
  const int32_t* table_offsets;     // [num_spans] where a span's block table begins
  const int32_t* block_tables;      // all tables, one after another
  const int32_t* logit_rows;        // [num_logits] which tokens are answered
  void* cache;                      // [num_layers, num_blocks, num_kv_heads, items of a head]; see layout.h
  float* logits;                    // [num_logits, vocab_size rounded up to 16]
};

TATKAL_API int32_t tatkal_interface_version();
TATKAL_API int32_t tatkal_isa();
TATKAL_API int64_t tatkal_kv_items_per_head(int32_t head_dim, int32_t block_size);

TATKAL_API void* tatkal_create(const TatkalShape* shape, int32_t num_threads, int32_t isa);
TATKAL_API void tatkal_destroy(void* model);
TATKAL_API const char* tatkal_set_norm(void* model, int32_t layer, int32_t norm, const float* scale);
TATKAL_API const char* tatkal_set_matrix(void* model, int32_t layer, int32_t role, const TatkalMatrix* matrix);
TATKAL_API const char* tatkal_set_rope(void* model, const float* cosines, const float* sines);
TATKAL_API const char* tatkal_finish(void* model);
TATKAL_API int64_t tatkal_packed_bytes(void* model);
TATKAL_API const char* tatkal_step(void* model, const TatkalStep* step);

// Single kernels, for tests. Float arrays are dense and row-major.
TATKAL_API const char* tatkal_test_linear(const TatkalMatrix* matrix, int32_t isa, int32_t num_rows, const float* x, float* y);
TATKAL_API void tatkal_test_quantize(int32_t num_rows, int32_t columns, int32_t group, const float* x, int8_t* codes,
                                     float* scales, float* offsets);
TATKAL_API void tatkal_test_rms_norm(int32_t num_rows, int32_t columns, float eps, const float* x, const float* scale, float* y);
TATKAL_API void tatkal_test_silu(int32_t num_rows, int32_t columns, const float* gate, const float* up, float* y);
TATKAL_API void tatkal_test_rotate(int32_t num_heads, int32_t head_dim, const float* cosines, const float* sines, float* heads);
TATKAL_API double tatkal_read_bandwidth(int64_t num_bytes, int32_t num_threads, int32_t num_rounds);
