// Runs steps of random models of awkward shapes; the sanitizers it is compiled with do the checking.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "native.h"

namespace {

std::mt19937 generator(7);

float draw() { return std::uniform_real_distribution<float>(-1, 1)(generator); }
int draw(int least, int most) { return std::uniform_int_distribution<int>(least, most)(generator); }

void require(const char* problem) {
  if (!problem) return;
  std::fprintf(stderr, "refused: %s\n", problem);
  std::exit(1);
}

uint16_t half(float value) {  // a positive normal float16, rounded down
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return uint16_t((bits >> 13) - (112 << 10));
}

// Exactly as large as the interface asks, so that reading beyond is noticed.
void set_matrix(void* model, int layer, int role, int format, int group, int rows, int columns) {
  TatkalMatrix matrix{};
  matrix.format = format, matrix.rows = rows, matrix.columns = columns;
  const size_t count = size_t(rows) * columns;
  std::vector<uint8_t> bytes(format == kInt4 ? count / 2 : format == kInt8 ? count : format == kFloat32 ? 4 * count : 2 * count);
  std::vector<uint16_t> scale, minimum;
  if (format >= kInt4) {
    for (auto& byte : bytes) byte = uint8_t(draw(0, 255));
    matrix.stored_group = group, matrix.group = group > 32 ? group / 2 : group;
    scale.assign(count / group, half(0.01f)), minimum.assign(count / group, half(0.03f));
    matrix.scale = scale.data(), matrix.minimum = minimum.data();
  } else {
    for (size_t i = 0; i < count; ++i) {
      const float value = 0.1f * std::fabs(draw()) + 0.01f;
      const uint16_t narrow = format == kFloat16 ? half(value) : 0x3c00;
      std::memcpy(bytes.data() + i * (format == kFloat32 ? 4 : 2), format == kFloat32 ? (const void*)&value : &narrow,
                  format == kFloat32 ? 4 : 2);
    }
  }
  matrix.values = bytes.data();
  require(tatkal_set_matrix(model, layer, role, &matrix));
}

void run_model(const TatkalShape& shape, int format, int group, int num_threads) {
  void* model = tatkal_create(&shape, num_threads, tatkal_isa());
  const int hidden = shape.hidden_size, inner = shape.intermediate_size;
  const int queries = shape.num_heads * shape.head_dim, keys = shape.num_kv_heads * shape.head_dim;
  std::vector<float> norm(hidden, 1.0f), rope(size_t(shape.num_positions) * shape.head_dim / 2, 0.5f);
  require(tatkal_set_norm(model, 0, kFinalNorm, norm.data()));
  set_matrix(model, 0, kEmbedding, format >= kInt4 ? kInt8 : format, group, shape.vocab_size, hidden);
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    require(tatkal_set_norm(model, layer, kAttentionNorm, norm.data()));
    require(tatkal_set_norm(model, layer, kMlpNorm, norm.data()));
    set_matrix(model, layer, kQuery, format, group, queries, hidden);
    set_matrix(model, layer, kKey, format, group, keys, hidden);
    set_matrix(model, layer, kValue, format, group, keys, hidden);
    set_matrix(model, layer, kAttentionOutput, format, group, hidden, queries);
    set_matrix(model, layer, kGate, format, group, inner, hidden);
    set_matrix(model, layer, kUp, format, group, inner, hidden);
    set_matrix(model, layer, kDown, format, group, hidden, inner);
  }
  require(tatkal_set_rope(model, rope.data(), rope.data()));
  require(tatkal_finish(model));

  const int num_blocks = 3 * ((shape.num_positions + shape.block_size - 1) / shape.block_size) + 1;
  const size_t items = size_t(tatkal_kv_items_per_head(shape.head_dim, shape.block_size));
  std::vector<uint8_t> cache(items * shape.num_kv_heads * num_blocks * shape.num_layers * (shape.kv_format == kFloat32 ? 4 : 2));
  std::vector<int> lengths(3, 0);
  for (int round = 0; round < 12; ++round) {
    std::vector<int32_t> tokens, starts, counts, offsets, tables, rows;
    for (int sequence = 0; sequence < 3; ++sequence) {
      const int left = shape.num_positions - lengths[sequence];
      const int count = std::min(left, round % 3 ? 1 : draw(1, 40));
      if (count < 1) continue;
      starts.push_back(lengths[sequence]), counts.push_back(count), offsets.push_back(int(tables.size()));
      lengths[sequence] += count;
      for (int block = 0; block * shape.block_size < lengths[sequence]; ++block) tables.push_back(1 + 3 * block + sequence);
      for (int i = 0; i < count; ++i) tokens.push_back(draw(0, shape.vocab_size - 1));
      rows.push_back(int(tokens.size()) - 1);
    }
    if (tokens.empty()) break;
    std::vector<float> logits(rows.size() * ((shape.vocab_size + 15) / 16 * 16));
    TatkalStep step{int(tokens.size()), int(counts.size()), int(rows.size()), num_blocks, tokens.data(), starts.data(),
                    counts.data(), offsets.data(), tables.data(), rows.data(), cache.data(), logits.data()};
    require(tatkal_step(model, &step));
    for (float logit : logits)
      if (!std::isfinite(logit)) require("a logit is no finite number");
  }
  tatkal_destroy(model);
}

}  // namespace

int main() {
  if (tatkal_isa() == kNone) return 77;
  for (int num_threads : {1, 3})
    for (int block_size : {1, 8, 32})
      for (int format : {kFloat32, kBfloat16, kFloat16}) {
        run_model({101, 51, 37, 2, 6, 2, 6, block_size, format, 90, 1e-5f}, format, 0, num_threads);
        run_model({64, 64, 96, 2, 4, 4, 32, block_size, format, 90, 1e-5f}, kInt4, 32, num_threads);
        run_model({70, 128, 64, 1, 20, 1, 32, block_size, format, 90, 1e-5f}, kInt4, 64, num_threads);
        run_model({33, 128, 128, 1, 2, 1, 64, block_size, format, 300, 1e-5f}, kInt8, 128, num_threads);
      }
  if (tatkal_read_bandwidth(1 << 20, 2, 2) <= 0) return 1;
  std::puts("done");
  return 0;
}
