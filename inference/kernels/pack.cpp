// From an artifact's row-major tensors to the packed layout of layout.h, and single rows back. Plain C++: runs once.
#include "convert.h"
#include "layout.h"

namespace {

// Where the code of `column` and row `lane` of a block stands: its byte, and in int4 its nibble.
size_t code_byte(const Matrix& matrix, int lane, int column) {
  if (matrix.format == kInt8) return size_t(column / 4) * 64 + 4 * lane + column % 4;
  return size_t(column / 8) * 64 + 4 * lane + column % 4;
}

int nibble_shift(int column) { return column % 8 < 4 ? 0 : 4; }

void pack_floats(const TatkalMatrix& source, const Matrix& matrix, uint8_t* data) {
  const size_t size = item_size(matrix.format);
  const auto* values = static_cast<const uint8_t*>(source.values);
  for (int row = 0; row < matrix.rows; ++row) {
    uint8_t* block = data + (row / kLanes) * matrix.block_bytes;
    const uint8_t* from = values + size_t(row) * matrix.columns * size;
    for (int column = 0; column < matrix.columns; ++column) {
      size_t item = size_t(column / 2) * kPairTile + pair_index(matrix.format, row % kLanes, column % 2);
      std::memcpy(block + item * size, from + column * size, size);
    }
  }
}

void pack_scales(const uint16_t* source, int stored_groups, const Matrix& matrix, int row, uint16_t* scales) {
  const int groups = matrix.num_groups();
  for (int group = 0; group < groups; ++group)
    scales[group * kLanes + row % kLanes] = source[size_t(row) * stored_groups + group * stored_groups / groups];
}

void pack_integers(const TatkalMatrix& source, const Matrix& matrix, uint8_t* data) {
  const int stored_groups = matrix.columns / source.stored_group;
  const auto* codes = static_cast<const uint8_t*>(source.values);
  for (int row = 0; row < matrix.rows; ++row) {
    uint8_t* block = data + (row / kLanes) * matrix.block_bytes;
    auto* scales = reinterpret_cast<uint16_t*>(block);
    pack_scales(source.scale, stored_groups, matrix, row, scales);
    uint8_t* packed = block + matrix.scale_bytes();
    const int lane = row % kLanes;
    if (matrix.format == kInt8) {
      const uint8_t* from = codes + size_t(row) * matrix.columns;
      for (int column = 0; column < matrix.columns; ++column)
        packed[code_byte(matrix, lane, column)] = uint8_t(from[column] + 128);
      continue;
    }
    pack_scales(source.minimum, stored_groups, matrix, row, scales + matrix.num_groups() * kLanes);
    const uint8_t* from = codes + size_t(row) * (matrix.columns / 2);
    for (int column = 0; column < matrix.columns; ++column) {
      uint8_t code = from[column / 2] >> (column % 2 ? 4 : 0) & 15;
      packed[code_byte(matrix, lane, column)] |= uint8_t(code << nibble_shift(column));
    }
  }
}

}  // namespace

size_t packed_block_bytes(const Matrix& matrix) {
  if (!matrix.is_integer()) return size_t(divide_up(matrix.columns, 2)) * kPairTile * item_size(matrix.format);
  return matrix.scale_bytes() + size_t(matrix.columns) * (matrix.format == kInt4 ? kLanes / 2 : kLanes);
}

void pack_matrix(const TatkalMatrix& source, const Matrix& matrix, uint8_t* data) {
  if (matrix.is_integer())
    pack_integers(source, matrix, data);
  else
    pack_floats(source, matrix, data);
}

void read_row(const Matrix& matrix, int row, float* values) {
  const uint8_t* block = matrix.block(row / kLanes);
  const int lane = row % kLanes;
  if (!matrix.is_integer()) {
    const auto* narrow = reinterpret_cast<const uint16_t*>(block);
    const auto* wide = reinterpret_cast<const float*>(block);
    for (int column = 0; column < matrix.columns; ++column) {
      size_t item = size_t(column / 2) * kPairTile + pair_index(matrix.format, lane, column % 2);
      values[column] = matrix.format == kFloat32    ? wide[item]
                       : matrix.format == kBfloat16 ? bfloat16_to_float(narrow[item])
                                                    : float16_to_float(narrow[item]);
    }
    return;
  }
  const auto* scales = reinterpret_cast<const uint16_t*>(block);
  const uint8_t* codes = block + matrix.scale_bytes();
  for (int column = 0; column < matrix.columns; ++column) {
    const int group = column / matrix.group;
    const float scale = float16_to_float(scales[group * kLanes + lane]);
    const uint8_t byte = codes[code_byte(matrix, lane, column)];
    if (matrix.format == kInt8) {
      values[column] = float(int(byte) - 128) * scale;
    } else {
      const float minimum = float16_to_float(scales[(matrix.num_groups() + group) * kLanes + lane]);
      values[column] = float(byte >> nibble_shift(column) & 15) * scale + minimum;
    }
  }
}
