// How weights and the cache lie in memory: everything in pieces of 16 lanes, so that a 512-bit register holds one number
// of 16 rows (weights), 16 keys or 16 dimensions of a value (cache), and no kernel ever shuffles.
//
// A *pair tile* is 32 numbers: 16 lanes times two neighbours along the summed dimension. In bfloat16 the two neighbours
// of a lane stand together, as vdpbf16ps wants them; in float16 and float32 the first neighbours of all lanes come first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native.h"

constexpr int kLanes = 16;
constexpr int kPairTile = 2 * kLanes;

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
inline int divide_up(int value, int divisor) { return (value + divisor - 1) / divisor; }

inline size_t item_size(Format format) { return format == kFloat32 ? 4 : 2; }

// Where the number of `lane` and neighbour `half` stands in a pair tile.
inline size_t pair_index(Format format, int lane, int half) {
  return format == kBfloat16 ? 2 * lane + half : kLanes * half + lane;
}

// A packed matrix [rows, columns]: blocks of 16 rows, the last one filled up with zeros.
//
// Floats: a block is [columns / 2, rounded up] pair tiles.
// int4:   a block is [groups][16] scales, [groups][16] minima (float16), then codes. 8 columns of 16 rows take 64 bytes:
//         byte 4 * row + k holds column k in the low and column 4 + k in the high nibble (k = 0..3).
// int8:   a block is [groups][16] scales, then codes + 128. 4 columns of 16 rows take 64 bytes, byte 4 * row + k.
// Scales are padded to whole cache lines, so that the codes are aligned.
struct Matrix {
  Format format = kFloat32;
  int rows = 0, columns = 0, group = 0;
  size_t block_bytes = 0;
  const uint8_t* data = nullptr;

  bool is_integer() const { return format == kInt4 || format == kInt8; }
  int num_blocks() const { return divide_up(rows, kLanes); }
  int num_groups() const { return is_integer() ? columns / group : 0; }
  size_t scale_bytes() const {  // of one block, minima included
    size_t parts = format == kInt4 ? 2 : 1;
    return (parts * num_groups() * kLanes * sizeof(uint16_t) + 63) / 64 * 64;
  }
  const uint8_t* block(int index) const { return data + index * block_bytes; }
};

size_t packed_block_bytes(const Matrix& matrix);

// Write `source` to `data`, which holds num_blocks * block_bytes zeros.
void pack_matrix(const TatkalMatrix& source, const Matrix& matrix, uint8_t* data);

// The dequantised `row` of a packed matrix, `columns` floats.
void read_row(const Matrix& matrix, int row, float* values);

// One KV block of one head: keys [key tiles][head_dim / 2] pair tiles with 16 keys as lanes, then values
// [key tiles][8 key pairs][head_dim / 16, rounded up] pair tiles with 16 dimensions as lanes.
// A key tile holds 16 keys, or the whole block where that is smaller.
struct KvLayout {
  int num_kv_heads, head_dim, block_size, num_blocks;

  int keys_per_tile() const { return block_size < kLanes ? block_size : kLanes; }
  int tiles_per_block() const { return divide_up(block_size, kLanes); }
  int dim_pairs() const { return head_dim / 2; }
  int dim_chunks() const { return divide_up(head_dim, kLanes); }
  size_t key_tile_items() const { return size_t(dim_pairs()) * kPairTile; }
  size_t value_tile_items() const { return size_t(kLanes / 2) * dim_chunks() * kPairTile; }
  size_t key_items() const { return tiles_per_block() * key_tile_items(); }
  size_t head_items() const { return key_items() + tiles_per_block() * value_tile_items(); }
  size_t layer_items() const { return head_items() * num_kv_heads * num_blocks; }
  // In items, within a layer.
  size_t key_tile(int block, int head, int tile) const {
    return (size_t(block) * num_kv_heads + head) * head_items() + tile * key_tile_items();
  }
  size_t value_tile(int block, int head, int tile) const {
    return (size_t(block) * num_kv_heads + head) * head_items() + key_items() + tile * value_tile_items();
  }
};
