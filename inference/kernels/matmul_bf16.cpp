// Rows times a bfloat16 matrix by vdpbf16ps: half the instructions of widening, but the activations are rounded as well.
#include "kernels.h"
#include "simd.h"

namespace {

constexpr int kTileRows = 8;

AVX512_BF16 __attribute__((always_inline)) inline __m512bh pair_of(const uint16_t* values) {
  int32_t both;
  __builtin_memcpy(&both, values, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}

// Even and odd pairs of columns are summed apart, and then together.
template <int M>
AVX512_BF16 void bf16_tile(const uint16_t* w, int num_pairs, const uint16_t* x, size_t stride, float* y, size_t y_stride,
                           bool accumulate) {
  __m512 even[M], odd[M];
  for (int m = 0; m < M; ++m) even[m] = odd[m] = _mm512_setzero_ps();
  int pair = 0;
  for (; pair + 2 <= num_pairs; pair += 2, w += 2 * kPairTile, x += 4) {
    const __m512bh first = (__m512bh)_mm512_loadu_si512(w);
    const __m512bh second = (__m512bh)_mm512_loadu_si512(w + kPairTile);
    _mm_prefetch(reinterpret_cast<const char*>(w) + 2048, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(w) + 2112, _MM_HINT_T0);
    for (int m = 0; m < M; ++m) {
      even[m] = _mm512_dpbf16_ps(even[m], first, pair_of(x + m * stride));
      odd[m] = _mm512_dpbf16_ps(odd[m], second, pair_of(x + m * stride + 2));
    }
  }
  if (pair < num_pairs) {
    const __m512bh last = (__m512bh)_mm512_loadu_si512(w);
    for (int m = 0; m < M; ++m) even[m] = _mm512_dpbf16_ps(even[m], last, pair_of(x + m * stride));
  }
  for (int m = 0; m < M; ++m) {
    const __m512 sum = _mm512_add_ps(even[m], odd[m]);
    float* to = y + m * y_stride;
    _mm512_storeu_ps(to, accumulate ? _mm512_add_ps(_mm512_loadu_ps(to), sum) : sum);
  }
}

using TileFunction = void (*)(const uint16_t*, int, const uint16_t*, size_t, float*, size_t, bool);
constexpr TileFunction kTiles[kTileRows + 1] = {nullptr,      bf16_tile<1>, bf16_tile<2>, bf16_tile<3>, bf16_tile<4>,
                                                bf16_tile<5>, bf16_tile<6>, bf16_tile<7>, bf16_tile<8>};

}  // namespace

void multiply_bf16(const Matrix& matrix, int first, int last, const Activations& x, int num_rows, float* y,
                   size_t y_stride, bool accumulate) {
  const int num_pairs = (matrix.columns + 1) / 2;
  for (int block = first; block < last; ++block) {
    const auto* w = reinterpret_cast<const uint16_t*>(matrix.block(block));
    for (int row = 0; row < num_rows; row += kTileRows) {
      const int rows = num_rows - row < kTileRows ? num_rows - row : kTileRows;
      kTiles[rows](w, num_pairs, x.rounded + row * x.stride, x.stride, y + row * y_stride + block * kLanes, y_stride,
                   accumulate);
    }
  }
}

AVX512 void round_to_bf16(const float* values, int count, uint16_t* rounded) {
  for (int i = 0; i < count; i += kLanes) store_lanes(Bfloat16{}, _mm512_loadu_ps(values + i), rounded + i);
}
