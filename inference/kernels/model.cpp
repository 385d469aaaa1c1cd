#include <cstdlib>
#include <cstring>

#include "model.h"

#include <algorithm>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr size_t kLargePage = size_t(2) << 20;
constexpr size_t kChunk = size_t(32) << 20;

}  // namespace

Arena::~Arena() {
  for (void* chunk : chunks_) std::free(chunk);
}

uint8_t* Arena::allocate(size_t num_bytes) {
  num_bytes = (num_bytes + 63) / 64 * 64;
  if (num_bytes > left_) {
    const size_t size = (std::max(num_bytes, kChunk) + kLargePage - 1) / kLargePage * kLargePage;
    void* chunk = std::aligned_alloc(kLargePage, size);
    if (!chunk) return nullptr;
    chunks_.push_back(chunk);
#if defined(__linux__)
    madvise(chunk, size, MADV_HUGEPAGE);
#endif
    free_ = static_cast<uint8_t*>(chunk);
    left_ = size;
  }
  uint8_t* result = free_;
  std::memset(result, 0, num_bytes);
  free_ += num_bytes;
  left_ -= num_bytes;
  used_ += int64_t(num_bytes);
  return result;
}

Model::Model(const TatkalShape& shape, int num_threads, Isa isa)
    : shape_(shape), isa_(isa), layers_(shape.num_layers), pool_(new Pool(num_threads)) {}

const char* Model::set_norm(int layer, Norm norm, const float* scale) {
  if (layer < 0 || layer >= shape_.num_layers) return "a norm of a layer that does not exist";
  auto* copy = reinterpret_cast<float*>(arena_.allocate(round_up(shape_.hidden_size, kLanes) * sizeof(float)));
  if (!copy) return "out of memory";
  std::memcpy(copy, scale, shape_.hidden_size * sizeof(float));
  (norm == kFinalNorm ? final_norm_ : norm == kMlpNorm ? layers_[layer].mlp_norm : layers_[layer].attention_norm) = copy;
  return nullptr;
}

const char* Model::expected_shape(Role role, int& rows, int& columns) const {
  const int hidden = shape_.hidden_size, inner = shape_.intermediate_size;
  const int queries = shape_.num_heads * shape_.head_dim, keys = shape_.num_kv_heads * shape_.head_dim;
  switch (role) {
    case kQuery: rows = queries, columns = hidden; return nullptr;
    case kKey:
    case kValue: rows = keys, columns = hidden; return nullptr;
    case kAttentionOutput: rows = hidden, columns = queries; return nullptr;
    case kGate:
    case kUp: rows = inner, columns = hidden; return nullptr;
    case kDown: rows = hidden, columns = inner; return nullptr;
    case kEmbedding:
    case kHead: rows = shape_.vocab_size, columns = hidden; return nullptr;
  }
  return "a matrix of an unknown role";
}

const char* Model::set_matrix(int layer, Role role, const TatkalMatrix& source) {
  int rows = 0, columns = 0;
  if (const char* problem = expected_shape(role, rows, columns)) return problem;
  if (layer < 0 || layer >= shape_.num_layers) return "a matrix of a layer that does not exist";
  if (source.rows != rows || source.columns != columns) return "a matrix has the wrong shape";
  Matrix matrix;
  matrix.format = Format(source.format);
  matrix.rows = rows;
  matrix.columns = columns;
  matrix.group = source.group;
  if (matrix.is_integer()) {
    if (source.group < 32 || source.group % 32 || source.stored_group % source.group || columns % source.stored_group)
      return "a matrix has groups that do not fit";
  }
  matrix.block_bytes = packed_block_bytes(matrix);
  uint8_t* data = arena_.allocate(matrix.num_blocks() * matrix.block_bytes);
  if (!data) return "out of memory";
  pack_matrix(source, matrix, data);
  matrix.data = data;
  (role == kEmbedding ? embedding_ : role == kHead ? head_ : layers_[layer].matrices[role]) = matrix;
  return nullptr;
}

const char* Model::set_rope(const float* cosines, const float* sines) {
  const size_t count = size_t(shape_.num_positions) * (shape_.head_dim / 2);
  auto* copy = reinterpret_cast<float*>(arena_.allocate(2 * count * sizeof(float)));
  if (!copy) return "out of memory";
  std::memcpy(copy, cosines, count * sizeof(float));
  std::memcpy(copy + count, sines, count * sizeof(float));
  cosines_ = copy;
  sines_ = copy + count;
  return nullptr;
}

const char* Model::finish_layer(Layer& layer) {
  if (!layer.attention_norm || !layer.mlp_norm) return "a norm is missing";
  for (const Matrix& matrix : layer.matrices)
    if (!matrix.data) return "a matrix is missing";
  for (int role : {kQuery, kKey, kValue}) layer.query_key_value.add(layer.matrices[role]);
  layer.attention_output.add(layer.matrices[kAttentionOutput]);
  for (int role : {kGate, kUp}) layer.gate_up.add(layer.matrices[role]);
  layer.down.add(layer.matrices[kDown]);
  for (const Linear* linear : {&layer.query_key_value, &layer.gate_up})
    for (const Matrix& matrix : linear->parts)
      if (matrix.is_integer() && matrix.group != linear->group) return "matrices with one input have different groups";
  return nullptr;
}

const char* Model::finish() {
  for (Layer& layer : layers_)
    if (const char* problem = finish_layer(layer)) return problem;
  if (!embedding_.data || !final_norm_ || !cosines_) return "the embedding, the last norm or the rotary table is missing";
  if (!head_.data) head_ = embedding_;
  head_linear_.add(head_);
  hidden_stride_ = round_up(shape_.hidden_size, kLanes);
  qkv_stride_ = layers_[0].query_key_value.num_outputs;
  gate_up_stride_ = layers_[0].gate_up.num_outputs;
  const int widest = std::max({shape_.hidden_size, shape_.num_heads * shape_.head_dim, shape_.intermediate_size});
  input_stride_ = round_up(widest, kLanes);
  group_stride_ = divide_up(widest, 32);
  scratch_size_ = (attention_scratch(shape_.num_heads / shape_.num_kv_heads, shape_.head_dim) + 31) / 16 * 16;
  is_finished_ = true;
  return nullptr;
}

bool Model::reserve(int num_tokens) {
  const size_t rows = num_tokens;
  bool done = hidden_.reserve(rows * hidden_stride_) && qkv_.reserve(rows * qkv_stride_) &&
              gate_up_.reserve(rows * gate_up_stride_) && values_.reserve(rows * input_stride_) &&
              codes_.reserve(rows * input_stride_) && scales_.reserve(rows * group_stride_) &&
              offsets_.reserve(rows * group_stride_) && biases_.reserve(rows * group_stride_) &&
              scratch_.reserve(scratch_size_ * pool_->num_threads());
  if (isa_ >= kAvx512Bf16) done = done && rounded_.reserve(rows * input_stride_);
  return done;
}

const char* Model::check(const TatkalStep& step) const {
  if (!is_finished_) return "the model is not finished";
  int num_tokens = 0;
  for (int span = 0; span < step.num_spans; ++span) {
    const int start = step.span_starts[span], length = step.span_lengths[span];
    if (start < 0 || length < 1 || start > shape_.num_positions - length) return "a position is outside of the context";
    const int* table = step.block_tables + step.table_offsets[span];
    for (int block = 0; block < divide_up(start + length, shape_.block_size); ++block)
      if (table[block] < 0 || table[block] >= step.num_blocks) return "a block is outside of the cache";
    num_tokens += length;
  }
  if (num_tokens != step.num_tokens || num_tokens < 1) return "the spans do not hold the tokens";
  for (int token = 0; token < num_tokens; ++token)
    if (step.token_ids[token] < 0 || step.token_ids[token] >= shape_.vocab_size) return "a token is not in the vocabulary";
  if (step.num_logits > num_tokens) return "more rows are answered than there are";
  for (int row = 0; row < step.num_logits; ++row)
    if (step.logit_rows[row] < 0 || step.logit_rows[row] >= num_tokens) return "a row to answer does not exist";
  return nullptr;
}
