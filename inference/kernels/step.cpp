// One step as a program: every layer is ten phases, and the tasks of a phase share no result.
#include <cstdlib>
#include <cstring>

#include "model.h"

#include <algorithm>

namespace {

// Of a layer. Between any two, all rows must be complete.
enum Phase { kNorm, kMultiplyQkv, kRotate, kAttend, kPrepareOutput, kMultiplyOutput, kMlpNormed, kMultiplyGateUp, kActivate,
             kMultiplyDown, kNumLayerPhases };

constexpr int kTasksPerThread = 6;  // so that a thread which is put aside holds little

}  // namespace

class StepProgram : public Program {
 public:
  StepProgram(Model& model, const TatkalStep& step);

  int num_phases() const override { return 3 + kNumLayerPhases * model_.shape_.num_layers; }
  int num_tasks(int phase) const override;
  void run(int phase, int task, int worker) override;

 private:
  struct Query {
    int first_row, num_rows, span;
  };

  bool is_embed(int phase) const { return phase == 0; }
  bool is_last_norm(int phase) const { return phase == num_phases() - 2; }
  bool is_head(int phase) const { return phase == num_phases() - 1; }
  const Layer& layer(int phase) const { return model_.layers_[(phase - 1) / kNumLayerPhases]; }
  const Linear& linear(int phase) const;

  int num_row_tasks(int rows) const { return divide_up(rows, rows_per_task(rows)); }
  int rows_per_task(int rows) const { return std::max(1, rows / (kTasksPerThread * num_threads_)); }
  int blocks_per_task(const Linear& linear) const {
    return std::max(1, linear.num_blocks / (kTasksPerThread * num_threads_));
  }

  void run_row(int phase, int row);
  void run_linear(int phase, int task);
  void attend_query(int phase, int task, int worker);

  void embed(int row);
  void norm(const float* hidden, const float* scale, int row, const Linear& next);
  void rotate_row(int phase, int row);
  void activate(int row, const Linear& next);
  void prepare(int row, const Linear& next);
  uint16_t* layer_cache(int phase) const;

  Model& model_;
  const TatkalStep& step_;
  const TatkalShape& shape_;
  const int num_threads_;
  const KvLayout kv_;
  const int group_;
  Activations input_;
  std::vector<Query> queries_;
};

StepProgram::StepProgram(Model& model, const TatkalStep& step)
    : model_(model), step_(step), shape_(model.shape_), num_threads_(model.pool_->num_threads()),
      kv_{shape_.num_kv_heads, shape_.head_dim, shape_.block_size, step.num_blocks},
      group_(shape_.num_heads / shape_.num_kv_heads) {
  input_.values = model.values_.get();
  input_.rounded = model.rounded_.get();
  input_.codes = model.codes_.get();
  input_.scales = model.scales_.get();
  input_.offsets = model.offsets_.get();
  input_.biases = model.biases_.get();
  input_.stride = model.input_stride_;
  input_.group_stride = model.group_stride_;
  model.places_.clear();
  for (int span = 0; span < step.num_spans; ++span) {
    const int first = int(model.places_.size()), length = step.span_lengths[span], most = queries_per_task(group_);
    for (int i = 0; i < length; ++i) model.places_.push_back({span, step.span_starts[span] + i});
    for (int i = 0; i < length; i += most) queries_.push_back({first + i, std::min(most, length - i), span});
  }
}

const Linear& StepProgram::linear(int phase) const {
  if (is_head(phase)) return model_.head_linear_;
  const Layer& each = layer(phase);
  switch ((phase - 1) % kNumLayerPhases) {
    case kMultiplyQkv: return each.query_key_value;
    case kMultiplyOutput: return each.attention_output;
    case kMultiplyGateUp: return each.gate_up;
    default: return each.down;
  }
}

int StepProgram::num_tasks(int phase) const {
  if (is_embed(phase)) return num_row_tasks(step_.num_tokens);
  if (is_last_norm(phase)) return step_.num_logits;
  if (is_head(phase) && step_.num_logits == 0) return 0;
  const int kind = is_head(phase) ? int(kMultiplyDown) : (phase - 1) % kNumLayerPhases;
  switch (kind) {
    case kMultiplyQkv:
    case kMultiplyOutput:
    case kMultiplyGateUp:
    case kMultiplyDown: return divide_up(linear(phase).num_blocks, blocks_per_task(linear(phase)));
    case kAttend: return int(queries_.size()) * shape_.num_kv_heads;
    case kPrepareOutput: {
      const Linear& next = layer(phase).attention_output;
      const bool is_ready = next.group == 0 && !(next.has_bfloat16 && model_.isa_ >= kAvx512Bf16);
      return is_ready ? 0 : num_row_tasks(step_.num_tokens);
    }
    default: return num_row_tasks(step_.num_tokens);
  }
}

void StepProgram::run(int phase, int task, int worker) {
  if (is_last_norm(phase)) {
    const float* hidden = model_.hidden_.get() + size_t(step_.logit_rows[task]) * model_.hidden_stride_;
    return norm(hidden, model_.final_norm_, task, model_.head_linear_);
  }
  if (is_head(phase)) return run_linear(phase, task);
  const int kind = is_embed(phase) ? int(kNorm) : (phase - 1) % kNumLayerPhases;
  if (kind == kAttend) return attend_query(phase, task, worker);
  if (kind == kMultiplyQkv || kind == kMultiplyOutput || kind == kMultiplyGateUp || kind == kMultiplyDown)
    return run_linear(phase, task);
  const int rows = rows_per_task(step_.num_tokens);
  const int last = std::min((task + 1) * rows, step_.num_tokens);
  for (int row = task * rows; row < last; ++row) run_row(phase, row);
}

void StepProgram::run_row(int phase, int row) {
  if (is_embed(phase)) return embed(row);
  const Layer& each = layer(phase);
  const float* hidden = model_.hidden_.get() + size_t(row) * model_.hidden_stride_;
  switch ((phase - 1) % kNumLayerPhases) {
    case kNorm: return norm(hidden, each.attention_norm, row, each.query_key_value);
    case kRotate: return rotate_row(phase, row);
    case kPrepareOutput: return prepare(row, each.attention_output);
    case kMlpNormed: return norm(hidden, each.mlp_norm, row, each.gate_up);
    default: return activate(row, each.down);
  }
}

void StepProgram::run_linear(int phase, int task) {
  const Linear& weights = linear(phase);
  const int blocks = blocks_per_task(weights);
  const int first = task * blocks, last = std::min(first + blocks, weights.num_blocks);
  float* y = model_.hidden_.get();
  size_t stride = model_.hidden_stride_;
  int rows = step_.num_tokens;
  bool accumulate = false;
  if (is_head(phase)) {
    y = step_.logits, stride = weights.num_outputs, rows = step_.num_logits;
  } else if (&weights == &layer(phase).query_key_value) {
    y = model_.qkv_.get(), stride = model_.qkv_stride_;
  } else if (&weights == &layer(phase).gate_up) {
    y = model_.gate_up_.get(), stride = model_.gate_up_stride_;
  } else {
    accumulate = true;  // the residual
  }
  multiply(weights, first, last, input_, rows, y, stride, accumulate, model_.isa_);
}

uint16_t* StepProgram::layer_cache(int phase) const {
  const size_t index = (phase - 1) / kNumLayerPhases, size = item_size(Format(shape_.kv_format));
  return static_cast<uint16_t*>(step_.cache) + index * kv_.layer_items() * size / sizeof(uint16_t);
}

void StepProgram::attend_query(int phase, int task, int worker) {
  const Query& query = queries_[task / shape_.num_kv_heads];
  const int head = task % shape_.num_kv_heads;
  AttentionTask attention;
  attention.block_table = step_.block_tables + step_.table_offsets[query.span];
  attention.start = model_.places_[query.first_row].position;
  attention.num_queries = query.num_rows;
  attention.kv_head = head;
  attention.group = group_;
  attention.queries =
      model_.qkv_.get() + size_t(query.first_row) * model_.qkv_stride_ + head * group_ * shape_.head_dim;
  attention.query_stride = model_.qkv_stride_;
  attention.answers = input_.values + query.first_row * input_.stride + head * group_ * shape_.head_dim;
  attention.answer_stride = input_.stride;
  attend(Format(shape_.kv_format), kv_, layer_cache(phase), attention,
         model_.scratch_.get() + worker * model_.scratch_size_);
}

void StepProgram::embed(int row) {
  read_row(model_.embedding_, step_.token_ids[row], model_.hidden_.get() + size_t(row) * model_.hidden_stride_);
}

void StepProgram::norm(const float* hidden, const float* scale, int row, const Linear& next) {
  rms_norm(hidden, scale, shape_.hidden_size, shape_.rms_norm_eps, input_.values + row * input_.stride);
  prepare(row, next);
}

void StepProgram::rotate_row(int phase, int row) {
  const Place place = model_.places_[row];
  const Linear& weights = layer(phase).query_key_value;
  const int head_dim = shape_.head_dim;
  float* queries = model_.qkv_.get() + size_t(row) * model_.qkv_stride_;
  float *keys = queries + weights.offsets[1], *values = queries + weights.offsets[2];
  const float* cosines = model_.cosines_ + size_t(place.position) * (head_dim / 2);
  const float* sines = model_.sines_ + size_t(place.position) * (head_dim / 2);
  for (int head = 0; head < shape_.num_heads; ++head) rotate(queries + head * head_dim, cosines, sines, head_dim);
  const int* table = step_.block_tables + step_.table_offsets[place.span];
  const int block = table[place.position / shape_.block_size], offset = place.position % shape_.block_size;
  for (int head = 0; head < shape_.num_kv_heads; ++head) {
    rotate(keys + head * head_dim, cosines, sines, head_dim);
    write_kv(Format(shape_.kv_format), kv_, layer_cache(phase), block, offset, head, keys + head * head_dim,
             values + head * head_dim);
  }
}

void StepProgram::activate(int row, const Linear& next) {
  const float* gate = model_.gate_up_.get() + size_t(row) * model_.gate_up_stride_;
  const int count = round_up(shape_.intermediate_size, kLanes);
  silu_multiply(gate, gate + count, count, input_.values + row * input_.stride);
  prepare(row, next);
}

void StepProgram::prepare(int row, const Linear& next) {
  const int padded = round_up(next.columns, kLanes);
  float* values = input_.values + row * input_.stride;
  // Attention leaves the numbers behind its last head as they were.
  std::fill(values + next.columns, values + padded, 0.0f);
  if (next.group) quantize_row(input_, row, next.columns, next.group);
  if (next.has_bfloat16 && model_.isa_ >= kAvx512Bf16)
    round_to_bf16(values, padded, input_.rounded + row * input_.stride);
}

const char* Model::step(const TatkalStep& step) {
  if (const char* problem = check(step)) return problem;
  if (!reserve(step.num_tokens)) return "out of memory";
  StepProgram program(*this, step);
  pool_->execute(program);
  return nullptr;
}
