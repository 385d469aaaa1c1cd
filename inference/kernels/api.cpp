// The C interface: checks what comes from outside, and lets no exception through.
#include <cstdlib>
#include <cstring>

#include "model.h"
#include "simd.h"

#include <algorithm>
#include <chrono>
#include <exception>

namespace {

Model& model_of(void* model) { return *static_cast<Model*>(model); }

template <class Function>
const char* guarded(Function function) {
  try {
    return function();
  } catch (const std::exception&) {
    return "out of memory or threads";
  }
}

// Whole registers from four places at once: as fast as these cores can read. The sum keeps the compiler from leaving it out.
AVX512 uint64_t read_words(const uint64_t* words, size_t count) {
  constexpr int kStreams = 4, kWords = 8;
  const size_t per_stream = count / kStreams / kWords * kWords;
  __m512i sums[kStreams];
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  for (size_t i = 0; i < per_stream; i += kWords)
    for (int stream = 0; stream < kStreams; ++stream)
      sums[stream] = _mm512_xor_si512(sums[stream], _mm512_loadu_si512(words + stream * per_stream + i));
  const __m512i both = _mm512_xor_si512(_mm512_xor_si512(sums[0], sums[1]), _mm512_xor_si512(sums[2], sums[3]));
  return uint64_t(_mm512_reduce_add_epi64(both));
}

// Reads a buffer once, in tasks.
class ReadProgram : public Program {
 public:
  ReadProgram(const uint64_t* words, size_t num_words, int num_tasks)
      : words_(words), per_task_(num_words / num_tasks), num_tasks_(num_tasks), sums_(num_tasks) {}
  int num_phases() const override { return 1; }
  int num_tasks(int) const override { return num_tasks_; }
  void run(int, int task, int) override { sums_[task] = read_words(words_ + task * per_task_, per_task_); }
  uint64_t sum() const {
    uint64_t total = 0;
    for (uint64_t sum : sums_) total ^= sum;
    return total;
  }

 private:
  const uint64_t* words_;
  size_t per_task_;
  int num_tasks_;
  std::vector<uint64_t> sums_;
};

}  // namespace

int32_t tatkal_interface_version() { return kInterfaceVersion; }

int32_t tatkal_isa() {
  __builtin_cpu_init();
  for (bool has : {bool(__builtin_cpu_supports("avx512f")), bool(__builtin_cpu_supports("avx512bw")),
                   bool(__builtin_cpu_supports("avx512dq")), bool(__builtin_cpu_supports("avx512vl")),
                   bool(__builtin_cpu_supports("avx512vnni")), bool(__builtin_cpu_supports("fma"))})
    if (!has) return kNone;
  return __builtin_cpu_supports("avx512bf16") ? kAvx512Bf16 : kAvx512Vnni;
}

int64_t tatkal_kv_items_per_head(int32_t head_dim, int32_t block_size) {
  return int64_t(KvLayout{1, head_dim, block_size, 1}.head_items());
}

void* tatkal_create(const TatkalShape* shape, int32_t num_threads, int32_t isa) {
  try {
    return new Model(*shape, num_threads, Isa(isa));
  } catch (const std::exception&) {
    return nullptr;
  }
}

void tatkal_destroy(void* model) { delete static_cast<Model*>(model); }

const char* tatkal_set_norm(void* model, int32_t layer, int32_t norm, const float* scale) {
  return guarded([&] { return model_of(model).set_norm(layer, Norm(norm), scale); });
}

const char* tatkal_set_matrix(void* model, int32_t layer, int32_t role, const TatkalMatrix* matrix) {
  return guarded([&] { return model_of(model).set_matrix(layer, Role(role), *matrix); });
}

const char* tatkal_set_rope(void* model, const float* cosines, const float* sines) {
  return guarded([&] { return model_of(model).set_rope(cosines, sines); });
}

const char* tatkal_finish(void* model) {
  return guarded([&] { return model_of(model).finish(); });
}

int64_t tatkal_packed_bytes(void* model) { return model_of(model).packed_bytes(); }

const char* tatkal_step(void* model, const TatkalStep* step) {
  return guarded([&] { return model_of(model).step(*step); });
}

const char* tatkal_test_linear(const TatkalMatrix* source, int32_t isa, int32_t num_rows, const float* x, float* y) {
  return guarded([&]() -> const char* {
    Arena arena;
    Matrix matrix;
    matrix.format = Format(source->format);
    matrix.rows = source->rows;
    matrix.columns = source->columns;
    matrix.group = source->group;
    matrix.block_bytes = packed_block_bytes(matrix);
    uint8_t* data = arena.allocate(matrix.num_blocks() * matrix.block_bytes);
    pack_matrix(*source, matrix, data);
    matrix.data = data;
    Linear linear;
    linear.add(matrix);
    const size_t stride = round_up(matrix.columns, kLanes), groups = divide_up(matrix.columns, 32);
    std::vector<float> values(num_rows * stride), outputs(size_t(num_rows) * linear.num_outputs);
    std::vector<float> scales(num_rows * groups), offsets(num_rows * groups);
    std::vector<int32_t> biases(num_rows * groups);
    std::vector<int8_t> codes(num_rows * stride);
    std::vector<uint16_t> rounded(num_rows * stride);
    Activations input{values.data(), stride, rounded.data(), codes.data(), scales.data(), offsets.data(), biases.data(), groups};
    for (int row = 0; row < num_rows; ++row) {
      std::memcpy(values.data() + row * stride, x + size_t(row) * matrix.columns, matrix.columns * sizeof(float));
      if (linear.group) quantize_row(input, row, matrix.columns, linear.group);
      round_to_bf16(values.data() + row * stride, int(stride), rounded.data() + row * stride);
    }
    multiply(linear, 0, linear.num_blocks, input, num_rows, outputs.data(), linear.num_outputs, false, Isa(isa));
    for (int row = 0; row < num_rows; ++row)
      std::memcpy(y + size_t(row) * matrix.rows, outputs.data() + size_t(row) * linear.num_outputs, matrix.rows * sizeof(float));
    return nullptr;
  });
}

void tatkal_test_quantize(int32_t num_rows, int32_t columns, int32_t group, const float* x, int8_t* codes, float* scales,
                          float* offsets) {
  const size_t groups = columns / group;
  std::vector<int32_t> biases(num_rows * groups);
  Activations input{const_cast<float*>(x), size_t(columns), nullptr, codes, scales, offsets, biases.data(), groups};
  for (int row = 0; row < num_rows; ++row) quantize_row(input, row, columns, group);
}

void tatkal_test_rms_norm(int32_t num_rows, int32_t columns, float eps, const float* x, const float* scale, float* y) {
  const size_t stride = round_up(columns, kLanes);
  std::vector<float> row(stride), weights(stride), result(stride);
  std::memcpy(weights.data(), scale, columns * sizeof(float));
  for (int i = 0; i < num_rows; ++i) {
    std::memcpy(row.data(), x + size_t(i) * columns, columns * sizeof(float));
    rms_norm(row.data(), weights.data(), columns, eps, result.data());
    std::memcpy(y + size_t(i) * columns, result.data(), columns * sizeof(float));
  }
}

void tatkal_test_silu(int32_t num_rows, int32_t columns, const float* gate, const float* up, float* y) {
  for (int row = 0; row < num_rows; ++row)
    silu_multiply(gate + size_t(row) * columns, up + size_t(row) * columns, columns, y + size_t(row) * columns);
}

void tatkal_test_rotate(int32_t num_heads, int32_t head_dim, const float* cosines, const float* sines, float* heads) {
  for (int head = 0; head < num_heads; ++head) rotate(heads + size_t(head) * head_dim, cosines, sines, head_dim);
}

double tatkal_read_bandwidth(int64_t num_bytes, int32_t num_threads, int32_t num_rounds) {
  Arena arena;
  auto* words = reinterpret_cast<uint64_t*>(arena.allocate(num_bytes));
  if (!words) return 0.0;
  Pool pool(num_threads);
  ReadProgram program(words, num_bytes / sizeof(uint64_t), 16 * num_threads);
  double best = 0.0;
  for (int round = 0; round < num_rounds; ++round) {
    const auto started = std::chrono::steady_clock::now();
    pool.execute(program);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    if (program.sum() == 1) return 0.0;
    best = std::max(best, double(num_bytes) / seconds.count());
  }
  return best;
}
