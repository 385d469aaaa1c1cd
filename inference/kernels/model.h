// A model's packed weights, and the step over them.
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"
#include "native.h"
#include "pool.h"

// Memory that lives as long as the model, zeroed, in large pages where the system has them.
class Arena {
 public:
  ~Arena();
  uint8_t* allocate(size_t num_bytes);  // aligned to 64; null if there is none left
  int64_t num_bytes() const { return used_; }

 private:
  std::vector<void*> chunks_;
  uint8_t* free_ = nullptr;
  size_t left_ = 0;
  int64_t used_ = 0;
};

// A buffer that grows, aligned to 64 and zeroed when it does.
template <class T>
class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  bool reserve(size_t count) {
    if (count <= count_) return true;
    std::free(data_);
    const size_t num_bytes = (count * sizeof(T) + 63) / 64 * 64 + 64;
    data_ = static_cast<T*>(std::aligned_alloc(64, num_bytes));
    count_ = data_ ? count : 0;
    if (data_) std::memset(static_cast<void*>(data_), 0, num_bytes);
    return data_ != nullptr;
  }
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

struct Layer {
  Matrix matrices[7];  // by Role
  const float *attention_norm = nullptr, *mlp_norm = nullptr;
  Linear query_key_value, attention_output, gate_up, down;
};

// Where a token of a step stands.
struct Place {
  int span, position;
};

class Model {
 public:
  Model(const TatkalShape& shape, int num_threads, Isa isa);

  const char* set_norm(int layer, Norm norm, const float* scale);
  const char* set_matrix(int layer, Role role, const TatkalMatrix& source);
  const char* set_rope(const float* cosines, const float* sines);
  const char* finish();
  const char* step(const TatkalStep& step);
  int64_t packed_bytes() const { return arena_.num_bytes(); }

 private:
  friend class StepProgram;

  const char* check(const TatkalStep& step) const;
  const char* expected_shape(Role role, int& rows, int& columns) const;
  const char* finish_layer(Layer& layer);
  bool reserve(int num_tokens);

  const TatkalShape shape_;
  const Isa isa_;
  Arena arena_;
  std::vector<Layer> layers_;
  Matrix embedding_, head_;
  Linear head_linear_;
  const float* final_norm_ = nullptr;
  const float *cosines_ = nullptr, *sines_ = nullptr;  // [num_positions, head_dim / 2]
  bool is_finished_ = false;

  // Of one step; rows are tokens. Strides are multiples of 16, what lies behind the last column is zero.
  int hidden_stride_ = 0, qkv_stride_ = 0, gate_up_stride_ = 0, input_stride_ = 0, group_stride_ = 0;
  Buffer<float> hidden_, qkv_, gate_up_, values_, scales_, offsets_, scratch_;
  Buffer<uint16_t> rounded_;
  Buffer<int8_t> codes_;
  Buffer<int32_t> biases_;
  std::vector<Place> places_;
  size_t scratch_size_ = 0;  // of one thread
  std::unique_ptr<Pool> pool_;
};
