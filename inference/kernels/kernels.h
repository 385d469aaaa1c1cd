// The kernels of a step. Rows are independent of each other: each is reduced in one fixed order, whatever their number,
// and whoever computes them.
#pragma once

#include <cstdlib>
#include <cstring>
#include <vector>

#include "layout.h"

// Rows that a matrix is multiplied with. Each kernel reads the form it needs.
struct Activations {
  // [rows, stride] float32, zero behind the last column up to a multiple of 16.
  float* values = nullptr;
  size_t stride = 0;
  // The same as bfloat16, for vdpbf16ps. [rows, stride]
  uint16_t* rounded = nullptr;
  // The same as int8: value = code * scale, both per row and group. [rows, stride], [rows, group_stride]
  int8_t* codes = nullptr;
  float* scales = nullptr;
  float* offsets = nullptr;    // scale * sum of the group's codes: what a weight's minimum is multiplied by
  int32_t* biases = nullptr;   // -128 * sum of the group's codes: undoes the 128 added to int8 weights
  size_t group_stride = 0;
};

// Matrices that share an input; their outputs stand side by side, each from a multiple of 16.
struct Linear {
  std::vector<Matrix> parts;
  std::vector<int> offsets;  // first output column of each part
  int columns = 0;
  int group = 0;             // of the integer parts; 0: none
  bool has_floats = false, has_bfloat16 = false;
  int num_outputs = 0;       // rounded up
  int num_blocks = 0;

  void add(const Matrix& matrix);
};

// y[row, 16 outputs of each block] = x * w for blocks [first, last) of `linear`; with `accumulate` it adds to y.
void multiply(const Linear& linear, int first, int last, const Activations& x, int num_rows, float* y, size_t y_stride,
              bool accumulate, Isa isa);

// Blocks [first, last) of one bfloat16 matrix by vdpbf16ps, which rounds the activations too.
void multiply_bf16(const Matrix& matrix, int first, int last, const Activations& x, int num_rows, float* y,
                   size_t y_stride, bool accumulate);
void round_to_bf16(const float* values, int count, uint16_t* rounded);

// Make `codes`, `scales`, `offsets` and `biases` of one row from its `values`.
void quantize_row(const Activations& x, int row, int columns, int group);

// y = x / root(mean(x^2) + eps) * scale. Arrays are padded with zeros to a multiple of 16.
void rms_norm(const float* x, const float* scale, int columns, float eps, float* y);

// y = gate / (1 + exp(-gate)) * up over `count` numbers, a multiple of 16.
void silu_multiply(const float* gate, const float* up, int count, float* y);

// Turn one head: dimension i and i + head_dim / 2 by the angle of i.
void rotate(float* head, const float* cosines, const float* sines, int head_dim);

// Store the key and the value of one token and head, [head_dim] each.
void write_kv(Format format, const KvLayout& layout, void* layer_cache, int block, int offset, int head,
              const float* key, const float* value);

// Queries of neighbouring tokens of one sequence and one KV head.
struct AttentionTask {
  const int32_t* block_table;
  int start;        // position of the first query
  int num_queries;
  int kv_head;
  int group;        // query heads of the KV head
  const float* queries;  // first query of the first head
  size_t query_stride;   // from token to token; heads follow each other
  float* answers;
  size_t answer_stride;
};

constexpr int kSplitTiles = 16;  // key tiles that are summed at once: 256 keys, in fixed places from position 0

// How many queries a task may hold, and the floats of scratch it needs.
int queries_per_task(int group);
size_t attention_scratch(int group, int head_dim);

void attend(Format format, const KvLayout& layout, const void* layer_cache, const AttentionTask& task, float* scratch);
