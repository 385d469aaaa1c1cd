// Rows times a packed matrix: tiles of 16 outputs by some rows. A tile of fewer rows only shares a weight among fewer;
// each output is summed over the columns in the same order in all of them.
#include "kernels.h"
#include "simd.h"

namespace {

struct Tile {
  const uint8_t* block;
  const Matrix& matrix;
  const Activations& x;
  int row;  // first row of the tile
  float* y;
  size_t y_stride;
  bool accumulate;
};

template <int M>
AVX512_INLINE void store_tile(const Tile& tile, const __m512* sums, int block = 0) {
  for (int m = 0; m < M; ++m) {
    float* y = tile.y + (tile.row + m) * tile.y_stride + block * kLanes;
    _mm512_storeu_ps(y, tile.accumulate ? _mm512_add_ps(_mm512_loadu_ps(y), sums[m]) : sums[m]);
  }
}

// Even and odd columns are summed apart, and then together. N neighbouring blocks share the broadcast activations.
template <class T, int M, int N>
AVX512 void float_tile(const Tile& tile) {
  using Item = typename T::Item;
  const size_t stride = tile.x.stride, block_items = tile.matrix.block_bytes / sizeof(Item);
  const auto* w = reinterpret_cast<const Item*>(tile.block);
  const float* x = tile.x.values + tile.row * stride;
  const int num_pairs = (tile.matrix.columns + 1) / 2;
  __m512 even[N][M], odd[N][M];
  for (int n = 0; n < N; ++n)
    for (int m = 0; m < M; ++m) even[n][m] = odd[n][m] = _mm512_setzero_ps();
  for (int pair = 0; pair < num_pairs; ++pair, w += kPairTile, x += 2) {
    __m512 first[N], second[N];
    for (int n = 0; n < N; ++n) {
      load_pair(T{}, w + n * block_items, first[n], second[n]);
      _mm_prefetch(reinterpret_cast<const char*>(w + n * block_items) + 2048, _MM_HINT_T0);
    }
    for (int m = 0; m < M; ++m) {
      const __m512 x_first = _mm512_set1_ps(x[m * stride]), x_second = _mm512_set1_ps(x[m * stride + 1]);
      for (int n = 0; n < N; ++n) {
        even[n][m] = _mm512_fmadd_ps(first[n], x_first, even[n][m]);
        odd[n][m] = _mm512_fmadd_ps(second[n], x_second, odd[n][m]);
      }
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int m = 0; m < M; ++m) even[n][m] = _mm512_add_ps(even[n][m], odd[n][m]);
    store_tile<M>(tile, even[n], n);
  }
}

// Four int8 activations as one broadcast operand.
AVX512_INLINE __m512i four_codes(const int8_t* codes) {
  int32_t four;
  __builtin_memcpy(&four, codes, sizeof four);
  return _mm512_set1_epi32(four);
}

// A group is one exact integer sum; groups are added one after another in float32.
template <int M>
AVX512 void int4_tile(const Tile& tile) {
  const Matrix& matrix = tile.matrix;
  const Activations& x = tile.x;
  const int groups = matrix.num_groups(), group = matrix.group;
  const auto* scales = reinterpret_cast<const __m256i*>(tile.block);
  const uint8_t* w = tile.block + matrix.scale_bytes();
  const int8_t* codes = x.codes + tile.row * x.stride;
  const float* x_scales = x.scales + tile.row * x.group_stride;
  const float* x_offsets = x.offsets + tile.row * x.group_stride;
  const __m512i low = _mm512_set1_epi8(15);
  __m512 sums[M];
  for (int m = 0; m < M; ++m) sums[m] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g) {
    __m512i dots[M];
    for (int m = 0; m < M; ++m) dots[m] = _mm512_setzero_si512();
    for (int part = 0; part < group; part += 32, w += 256, codes += 32) {
      for (int i = 0; i < 4; ++i) {
        const __m512i both = _mm512_loadu_si512(w + 64 * i);
        const __m512i first = _mm512_and_si512(both, low);
        const __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        _mm_prefetch(reinterpret_cast<const char*>(w) + 2048 + 64 * i, _MM_HINT_T0);
        for (int m = 0; m < M; ++m) dots[m] = _mm512_dpbusd_epi32(dots[m], first, four_codes(codes + m * x.stride + 8 * i));
        for (int m = 0; m < M; ++m)
          dots[m] = _mm512_dpbusd_epi32(dots[m], second, four_codes(codes + m * x.stride + 8 * i + 4));
      }
    }
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(scales + g));
    const __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256(scales + groups + g));
    for (int m = 0; m < M; ++m) {
      const __m512 dot = _mm512_cvtepi32_ps(dots[m]);
      const __m512 x_scale = _mm512_set1_ps(x_scales[m * x.group_stride + g]);
      const __m512 x_offset = _mm512_set1_ps(x_offsets[m * x.group_stride + g]);
      sums[m] = _mm512_fmadd_ps(_mm512_mul_ps(dot, scale), x_scale, sums[m]);
      sums[m] = _mm512_fmadd_ps(minimum, x_offset, sums[m]);
    }
  }
  store_tile<M>(tile, sums);
}

template <int M>
AVX512 void int8_tile(const Tile& tile) {
  const Matrix& matrix = tile.matrix;
  const Activations& x = tile.x;
  const int groups = matrix.num_groups(), group = matrix.group;
  const auto* scales = reinterpret_cast<const __m256i*>(tile.block);
  const uint8_t* w = tile.block + matrix.scale_bytes();
  const int8_t* codes = x.codes + tile.row * x.stride;
  const float* x_scales = x.scales + tile.row * x.group_stride;
  const int32_t* x_biases = x.biases + tile.row * x.group_stride;
  __m512 sums[M];
  for (int m = 0; m < M; ++m) sums[m] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g) {
    __m512i dots[M];
    for (int m = 0; m < M; ++m) dots[m] = _mm512_set1_epi32(x_biases[m * x.group_stride + g]);
    for (int part = 0; part < group; part += 32, w += 512, codes += 32) {
      for (int i = 0; i < 8; ++i) {
        const __m512i four = _mm512_loadu_si512(w + 64 * i);
        _mm_prefetch(reinterpret_cast<const char*>(w) + 2048 + 64 * i, _MM_HINT_T0);
        for (int m = 0; m < M; ++m) dots[m] = _mm512_dpbusd_epi32(dots[m], four, four_codes(codes + m * x.stride + 4 * i));
      }
    }
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(scales + g));
    for (int m = 0; m < M; ++m) {
      const __m512 dot = _mm512_cvtepi32_ps(dots[m]);
      const __m512 x_scale = _mm512_set1_ps(x_scales[m * x.group_stride + g]);
      sums[m] = _mm512_fmadd_ps(_mm512_mul_ps(dot, scale), x_scale, sums[m]);
    }
  }
  store_tile<M>(tile, sums);
}

using TileFunction = void (*)(const Tile&);

template <int M>
void integer_tile(const Tile& tile) {
  return tile.matrix.format == kInt4 ? int4_tile<M>(tile) : int8_tile<M>(tile);
}

template <int M, int N>
void any_float_tile(const Tile& tile) {
  switch (tile.matrix.format) {
    case kBfloat16: return float_tile<Bfloat16, M, N>(tile);
    case kFloat16: return float_tile<Float16, M, N>(tile);
    default: return float_tile<Float32, M, N>(tile);
  }
}

// By the number of rows. Up to 12 rows share one block's weights; where more tiles are due anyway, two blocks share the
// activations of 6 rows, which loads less.
constexpr int kMostRows = 12, kMostPairRows = 6;
constexpr TileFunction kIntegerTiles[kMostRows + 1] = {
    nullptr,         integer_tile<1>, integer_tile<2>, integer_tile<3>,  integer_tile<4>,  integer_tile<5>, integer_tile<6>,
    integer_tile<7>, integer_tile<8>, integer_tile<9>, integer_tile<10>, integer_tile<11>, integer_tile<12>};
constexpr TileFunction kFloatTiles[kMostRows + 1] = {
    nullptr,              any_float_tile<1, 1>, any_float_tile<2, 1>,  any_float_tile<3, 1>,  any_float_tile<4, 1>,
    any_float_tile<5, 1>, any_float_tile<6, 1>, any_float_tile<7, 1>,  any_float_tile<8, 1>,  any_float_tile<9, 1>,
    any_float_tile<10, 1>, any_float_tile<11, 1>, any_float_tile<12, 1>};
constexpr TileFunction kFloatPairTiles[kMostPairRows + 1] = {
    nullptr,              any_float_tile<1, 2>, any_float_tile<2, 2>, any_float_tile<3, 2>,
    any_float_tile<4, 2>, any_float_tile<5, 2>, any_float_tile<6, 2>};

// Tiles of equal height, so that the last one is not a lone row.
void multiply_rows(Tile tile, int num_rows, const TileFunction* tiles, int most_rows) {
  const int num_tiles = divide_up(num_rows, most_rows);
  for (int i = 0; i < num_tiles; ++i) {
    const int last = int(int64_t(num_rows) * (i + 1) / num_tiles);
    tiles[last - tile.row](tile);
    tile.row = last;
  }
}

void multiply_blocks(const Matrix& matrix, int first, int last, const Activations& x, int num_rows, float* y,
                     size_t y_stride, bool accumulate) {
  const bool in_pairs = num_rows <= kMostPairRows || num_rows > kMostRows;
  for (int block = first; block < last; ++block) {
    const Tile tile{matrix.block(block), matrix, x, 0, y + block * kLanes, y_stride, accumulate};
    if (matrix.is_integer()) {
      multiply_rows(tile, num_rows, kIntegerTiles, kMostRows);
    } else if (in_pairs && block + 1 < last) {
      multiply_rows(tile, num_rows, kFloatPairTiles, kMostPairRows);
      ++block;
    } else {
      multiply_rows(tile, num_rows, kFloatTiles, kMostRows);
    }
  }
}

}  // namespace

void Linear::add(const Matrix& matrix) {
  parts.push_back(matrix);
  offsets.push_back(num_outputs);
  columns = matrix.columns;
  num_blocks += matrix.num_blocks();
  num_outputs += matrix.num_blocks() * kLanes;
  if (matrix.is_integer()) group = matrix.group;
  has_floats |= !matrix.is_integer();
  has_bfloat16 |= matrix.format == kBfloat16;
}

void multiply(const Linear& linear, int first, int last, const Activations& x, int num_rows, float* y, size_t y_stride,
              bool accumulate, Isa isa) {
  for (size_t part = 0; part < linear.parts.size(); ++part) {
    const Matrix& matrix = linear.parts[part];
    const int begin = first > 0 ? first : 0;
    const int end = last < matrix.num_blocks() ? last : matrix.num_blocks();
    float* outputs = y + linear.offsets[part];
    if (begin < end && matrix.format == kBfloat16 && isa >= kAvx512Bf16)
      multiply_bf16(matrix, begin, end, x, num_rows, outputs, y_stride, accumulate);
    else
      multiply_blocks(matrix, begin, end, x, num_rows, outputs, y_stride, accumulate);
    first -= matrix.num_blocks();
    last -= matrix.num_blocks();
  }
}
