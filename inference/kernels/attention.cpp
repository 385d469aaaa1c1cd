// Paged attention of one KV head: scores with 16 keys as lanes, answers with 16 dimensions as lanes.
//
// Keys are taken in splits of fixed places (kSplitTiles tiles from position 0), each with its exact maximum, and splits
// are merged in order. What a query sees behind its own position weighs exactly zero, so a query's answer does not depend
// on the queries it is computed with, nor on how a prompt was cut.
#include "kernels.h"
#include "simd.h"

namespace {

constexpr int kTileRows = 8;
constexpr int kSplitKeys = kSplitTiles * kLanes;
constexpr int kMaxTaskRows = 64;
constexpr int kAnswerRegisters = 24;  // of 32

// Scratch of a task; a row is one query of one head.
struct Scratch {
  float* queries;  // [rows, head_dim], scaled
  float* weights;  // [8, kSplitKeys]: scores, then weights, of one tile of rows
  float* sums;     // [rows, 16] of weights, by lane
  float* maxima;   // [rows]
  float* answers;  // [rows, head_dim rounded up]
};

struct Split {
  int first_tile, num_tiles;  // of the sequence
  int num_keys;               // of the whole sequence that the task sees
  int start, group;           // position of the first row, rows of one position

  int length(int row) const { return start + row / group + 1; }  // keys that a row sees
};

template <class T>
struct Cache {
  const KvLayout& layout;
  const typename T::Item* items;
  const int32_t* table;
  int head;

  const typename T::Item* keys(int tile) const {
    const int per_block = layout.tiles_per_block();
    return items + layout.key_tile(table[tile / per_block], head, tile % per_block);
  }
  const typename T::Item* values(int tile) const {
    const int per_block = layout.tiles_per_block();
    return items + layout.value_tile(table[tile / per_block], head, tile % per_block);
  }
};

template <class Item>
AVX512_INLINE void prefetch(const Item* items, size_t count) {
  for (size_t i = 0; i < count; i += 64 / sizeof(Item)) _mm_prefetch(reinterpret_cast<const char*>(items + i), _MM_HINT_T0);
}

// Scores of R rows for the keys of a split, and their maxima. Blocks lie anywhere in memory, so the keys of the next tile
// and the values of this one are fetched meanwhile.
template <class T, int R>
AVX512_INLINE void score(const Cache<T>& cache, const Split& split, const float* queries, int row, float* scores,
                         __m512* maxima) {
  const int head_dim = cache.layout.head_dim, per_tile = cache.layout.keys_per_tile();
  const __m512 hidden = _mm512_set1_ps(-__builtin_inff());
  for (int r = 0; r < R; ++r) maxima[r] = hidden;
  for (int t = 0; t < split.num_tiles; ++t) {
    const auto* keys = cache.keys(split.first_tile + t);
    if (row == 0) {
      if (t + 1 < split.num_tiles) prefetch(cache.keys(split.first_tile + t + 1), cache.layout.key_tile_items());
      prefetch(cache.values(split.first_tile + t), cache.layout.value_tile_items());
    }
    __m512 even[R], odd[R];
    for (int r = 0; r < R; ++r) even[r] = odd[r] = _mm512_setzero_ps();
    for (int dim = 0; dim < head_dim; dim += 2, keys += kPairTile) {
      __m512 first, second;
      load_pair(T{}, keys, first, second);
      for (int r = 0; r < R; ++r) {
        even[r] = _mm512_fmadd_ps(first, _mm512_set1_ps(queries[r * head_dim + dim]), even[r]);
        odd[r] = _mm512_fmadd_ps(second, _mm512_set1_ps(queries[r * head_dim + dim + 1]), odd[r]);
      }
    }
    const int first_key = (split.first_tile + t) * per_tile;
    for (int r = 0; r < R; ++r) {
      const int left = split.length(row + r) - first_key, count = left < per_tile ? left : per_tile;
      const __m512 sum = _mm512_mask_blend_ps(first_lanes(count), hidden, _mm512_add_ps(even[r], odd[r]));
      maxima[r] = _mm512_max_ps(maxima[r], sum);
      _mm512_storeu_ps(scores + r * kSplitKeys + t * kLanes, sum);
    }
  }
}

// Weights of one row from its scores; the answers so far are scaled to the new maximum. Returns the scaling factor.
AVX512_INLINE __m512 weigh(float* scores, int num_tiles, __m512 split_maximum, float* maximum, float* sums) {
  const float before = *maximum, largest = _mm512_reduce_max_ps(split_maximum);
  *maximum = largest > before ? largest : before;
  const __m512 top = _mm512_set1_ps(*maximum);
  const __m512 factor = exp_lanes(_mm512_sub_ps(_mm512_set1_ps(before), top));
  __m512 total = _mm512_mul_ps(_mm512_loadu_ps(sums), factor);
  for (int t = 0; t < num_tiles; ++t) {
    const __m512 weight = exp_lanes(_mm512_sub_ps(_mm512_loadu_ps(scores + t * kLanes), top));
    total = _mm512_add_ps(total, weight);
    _mm512_storeu_ps(scores + t * kLanes, weight);
  }
  _mm512_storeu_ps(sums, total);
  return factor;
}

// Add C chunks of 16 dimensions of a split's values to R answers.
template <class T, int R, int C>
AVX512_INLINE void add_chunks(const Cache<T>& cache, const Split& split, const float* weights, const __m512* factors,
                              int chunk, float* answers, size_t stride) {
  const int chunks = cache.layout.dim_chunks(), per_tile = cache.layout.keys_per_tile();
  __m512 even[R][C], odd[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) even[r][c] = odd[r][c] = _mm512_setzero_ps();
  for (int t = 0; t < split.num_tiles; ++t) {
    const auto* values = cache.values(split.first_tile + t) + chunk * kPairTile;
    const int left = split.num_keys - (split.first_tile + t) * per_tile;
    const int count = left < per_tile ? left : per_tile;
    const float* tile_weights = weights + t * kLanes;
    int key = 0;
    for (; key + 2 <= count; key += 2, values += chunks * kPairTile)
      for (int c = 0; c < C; ++c) {
        __m512 first, second;
        load_pair(T{}, values + c * kPairTile, first, second);
        for (int r = 0; r < R; ++r) {
          const float* weight = tile_weights + r * kSplitKeys + key;
          even[r][c] = _mm512_fmadd_ps(first, _mm512_set1_ps(weight[0]), even[r][c]);
          odd[r][c] = _mm512_fmadd_ps(second, _mm512_set1_ps(weight[1]), odd[r][c]);
        }
      }
    if (key < count)  // the second slot was not written: what lies there may be no number
      for (int c = 0; c < C; ++c) {
        __m512 first, second;
        load_pair(T{}, values + c * kPairTile, first, second);
        for (int r = 0; r < R; ++r)
          even[r][c] = _mm512_fmadd_ps(first, _mm512_set1_ps(tile_weights[r * kSplitKeys + key]), even[r][c]);
      }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      float* answer = answers + r * stride + (chunk + c) * kLanes;
      const __m512 sum = _mm512_add_ps(even[r][c], odd[r][c]);
      _mm512_storeu_ps(answer, _mm512_fmadd_ps(_mm512_loadu_ps(answer), factors[r], sum));
    }
}

// Add the values of a split to R answers: as many chunks at once as registers hold, which changes no order.
template <class T, int R>
AVX512_INLINE void add_values(const Cache<T>& cache, const Split& split, const float* weights, const __m512* factors,
                              float* answers, size_t stride) {
  constexpr int kFit = kAnswerRegisters / (2 * R), kAtOnce = kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  const int chunks = cache.layout.dim_chunks();
  int chunk = 0;
  for (; chunk + kAtOnce <= chunks; chunk += kAtOnce)
    add_chunks<T, R, kAtOnce>(cache, split, weights, factors, chunk, answers, stride);
  for (; chunk < chunks; ++chunk) add_chunks<T, R, 1>(cache, split, weights, factors, chunk, answers, stride);
}

template <class T, int R>
AVX512 void attend_rows(const Cache<T>& cache, const Split& split, const Scratch& scratch, int row) {
  const int head_dim = cache.layout.head_dim;
  const size_t stride = size_t(cache.layout.dim_chunks()) * kLanes;
  __m512 maxima[R], factors[R];
  score<T, R>(cache, split, scratch.queries + size_t(row) * head_dim, row, scratch.weights, maxima);
  for (int r = 0; r < R; ++r)
    factors[r] = weigh(scratch.weights + r * kSplitKeys, split.num_tiles, maxima[r], scratch.maxima + row + r,
                       scratch.sums + (row + r) * kLanes);
  add_values<T, R>(cache, split, scratch.weights, factors, scratch.answers + row * stride, stride);
}

template <class T>
void attend_split(const Cache<T>& cache, const Split& split, const Scratch& scratch, int num_rows) {
  int row = 0;
  for (; row + kTileRows <= num_rows; row += kTileRows)
    attend_rows<T, kTileRows>(cache, split, scratch, row);
  switch (num_rows - row) {
    case 1: return attend_rows<T, 1>(cache, split, scratch, row);
    case 2: return attend_rows<T, 2>(cache, split, scratch, row);
    case 3: return attend_rows<T, 3>(cache, split, scratch, row);
    case 4: return attend_rows<T, 4>(cache, split, scratch, row);
    case 5: return attend_rows<T, 5>(cache, split, scratch, row);
    case 6: return attend_rows<T, 6>(cache, split, scratch, row);
    case 7: return attend_rows<T, 7>(cache, split, scratch, row);
  }
}

int rows_per_task(int group) { return queries_per_task(group) * group; }

Scratch carve(float* memory, int group, int head_dim) {
  const int rows = rows_per_task(group);
  Scratch scratch;
  scratch.weights = memory;
  scratch.sums = scratch.weights + kTileRows * kSplitKeys;
  scratch.answers = scratch.sums + rows * kLanes;
  scratch.queries = scratch.answers + size_t(rows) * round_up(head_dim, kLanes);
  scratch.maxima = scratch.queries + size_t(rows) * head_dim;
  return scratch;
}

AVX512 void start_rows(const AttentionTask& task, const KvLayout& layout, const Scratch& scratch) {
  const int head_dim = layout.head_dim;
  const float scale = 1.0f / __builtin_sqrtf(float(head_dim));
  for (int query = 0, row = 0; query < task.num_queries; ++query)
    for (int head = 0; head < task.group; ++head, ++row) {
      const float* from = task.queries + query * task.query_stride + head * head_dim;
      float* to = scratch.queries + size_t(row) * head_dim;
      for (int i = 0; i < head_dim; i += kLanes) {
        const __mmask16 mask = first_lanes(head_dim - i);
        _mm512_mask_storeu_ps(to + i, mask,
                              _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, from + i), _mm512_set1_ps(scale)));
      }
      scratch.maxima[row] = -__builtin_inff();
    }
  const size_t num_answers = size_t(task.num_queries) * task.group * layout.dim_chunks() * kLanes;
  for (size_t i = 0; i < num_answers; i += kLanes) _mm512_storeu_ps(scratch.answers + i, _mm512_setzero_ps());
  for (int row = 0; row < task.num_queries * task.group; ++row)
    _mm512_storeu_ps(scratch.sums + row * kLanes, _mm512_setzero_ps());
}

AVX512 void finish_rows(const AttentionTask& task, const KvLayout& layout, const Scratch& scratch) {
  const int head_dim = layout.head_dim;
  const size_t stride = size_t(layout.dim_chunks()) * kLanes;
  for (int query = 0, row = 0; query < task.num_queries; ++query)
    for (int head = 0; head < task.group; ++head, ++row) {
      const __m512 inverse = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(_mm512_loadu_ps(scratch.sums + row * kLanes)));
      float* to = task.answers + query * task.answer_stride + head * head_dim;
      for (int i = 0; i < head_dim; i += kLanes)
        _mm512_mask_storeu_ps(to + i, first_lanes(head_dim - i),
                              _mm512_mul_ps(_mm512_loadu_ps(scratch.answers + row * stride + i), inverse));
    }
}

template <class T>
void attend_in(const KvLayout& layout, const void* layer_cache, const AttentionTask& task, float* memory) {
  const Cache<T> cache{layout, static_cast<const typename T::Item*>(layer_cache), task.block_table, task.kv_head};
  const Scratch scratch = carve(memory, task.group, layout.head_dim);
  start_rows(task, layout, scratch);
  const int num_keys = task.start + task.num_queries;
  const int num_tiles = divide_up(num_keys, layout.keys_per_tile());
  for (int first = 0; first < num_tiles; first += kSplitTiles) {
    const int tiles = num_tiles - first < kSplitTiles ? num_tiles - first : kSplitTiles;
    attend_split<T>(cache, {first, tiles, num_keys, task.start, task.group}, scratch, task.num_queries * task.group);
  }
  finish_rows(task, layout, scratch);
}

// Item of the key's dimension `dim` at slot `lane` of its tile, and of the value's.
size_t key_item(Format format, int lane, int dim) {
  return size_t(dim / 2) * kPairTile + pair_index(format, lane, dim % 2);
}
size_t value_item(Format format, int chunks, int lane, int dim) {
  return (size_t(lane / 2) * chunks + dim / kLanes) * kPairTile + pair_index(format, dim % kLanes, lane % 2);
}

template <class T>
AVX512 void write_kv_as(const KvLayout& layout, void* layer_cache, int block, int offset, int head, const float* key,
                        const float* value) {
  const int tile = offset / kLanes, lane = offset % kLanes, chunks = layout.dim_chunks();
  auto* items = static_cast<typename T::Item*>(layer_cache);
  auto* keys = items + layout.key_tile(block, head, tile);
  auto* values = items + layout.value_tile(block, head, tile);
  for (int i = 0; i < layout.head_dim; i += kLanes) {
    const __mmask16 mask = first_lanes(layout.head_dim - i);
    typename T::Item narrow_key[kLanes], narrow_value[kLanes];
    store_lanes(T{}, _mm512_maskz_loadu_ps(mask, key + i), narrow_key);
    store_lanes(T{}, _mm512_maskz_loadu_ps(mask, value + i), narrow_value);
    for (int j = 0; j < kLanes; ++j) {
      if (i + j < layout.head_dim) keys[key_item(T::format, lane, i + j)] = narrow_key[j];
      values[value_item(T::format, chunks, lane, i + j)] = narrow_value[j];  // zero behind the last dimension
    }
  }
}

}  // namespace

int queries_per_task(int group) { return group >= kMaxTaskRows ? 1 : kMaxTaskRows / group; }

size_t attention_scratch(int group, int head_dim) {
  const size_t rows = rows_per_task(group);
  return kTileRows * kSplitKeys + rows * (kLanes + round_up(head_dim, kLanes) + head_dim + 1);
}

void attend(Format format, const KvLayout& layout, const void* layer_cache, const AttentionTask& task, float* scratch) {
  if (format == kBfloat16) return attend_in<Bfloat16>(layout, layer_cache, task, scratch);
  if (format == kFloat16) return attend_in<Float16>(layout, layer_cache, task, scratch);
  attend_in<Float32>(layout, layer_cache, task, scratch);
}

void write_kv(Format format, const KvLayout& layout, void* layer_cache, int block, int offset, int head,
              const float* key, const float* value) {
  if (format == kBfloat16) return write_kv_as<Bfloat16>(layout, layer_cache, block, offset, head, key, value);
  if (format == kFloat16) return write_kv_as<Float16>(layout, layer_cache, block, offset, head, key, value);
  write_kv_as<Float32>(layout, layer_cache, block, offset, head, key, value);
}
