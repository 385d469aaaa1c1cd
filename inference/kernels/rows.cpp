// What happens to a row between two matrices: norm, quantisation, activation, rotary turn.
#include "kernels.h"
#include "simd.h"

AVX512 void rms_norm(const float* x, const float* scale, int columns, float eps, float* y) {
  const int padded = round_up(columns, kLanes);
  __m512 squares = _mm512_setzero_ps();
  for (int i = 0; i < padded; i += kLanes) {
    const __m512 value = _mm512_loadu_ps(x + i);
    squares = _mm512_fmadd_ps(value, value, squares);
  }
  const float mean = _mm512_reduce_add_ps(squares) / float(columns);
  const __m512 inverse = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + eps));
  for (int i = 0; i < padded; i += kLanes) {
    const __m512 value = _mm512_mul_ps(_mm512_loadu_ps(x + i), inverse);
    _mm512_storeu_ps(y + i, _mm512_mul_ps(value, _mm512_loadu_ps(scale + i)));
  }
}

// The largest magnitude of a group becomes code 127; a group with a NaN gets the scale NaN, so that it shows.
AVX512 void quantize_row(const Activations& x, int row, int columns, int group) {
  const float* values = x.values + row * x.stride;
  int8_t* codes = x.codes + row * x.stride;
  for (int g = 0; g < columns / group; ++g, values += group, codes += group) {
    __m512 largest = _mm512_setzero_ps();
    __mmask16 is_nan = 0;
    for (int i = 0; i < group; i += kLanes) {
      const __m512 value = _mm512_loadu_ps(values + i);
      largest = _mm512_max_ps(largest, _mm512_abs_ps(value));
      is_nan |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    }
    const float amax = is_nan ? __builtin_nanf("") : _mm512_reduce_max_ps(largest);
    const float scale = amax / 127.0f;
    const __m512 inverse = _mm512_set1_ps(amax > 0.0f ? 127.0f / amax : 0.0f);
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < group; i += kLanes) {
      const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(values + i), inverse));
      sum = _mm512_add_epi32(sum, code);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtsepi32_epi8(code));
    }
    const int total = _mm512_reduce_add_epi32(sum);
    x.scales[row * x.group_stride + g] = scale;
    x.offsets[row * x.group_stride + g] = scale * float(total);
    x.biases[row * x.group_stride + g] = -128 * total;
  }
}

AVX512 void silu_multiply(const float* gate, const float* up, int count, float* y) {
  const __m512 one = _mm512_set1_ps(1.0f), most = _mm512_set1_ps(87.0f);
  for (int i = 0; i < count; i += kLanes) {
    const __m512 value = _mm512_loadu_ps(gate + i);
    const __m512 minus = _mm512_sub_ps(_mm512_setzero_ps(), value);
    const __m512 power = exp_lanes(_mm512_min_ps(most, minus));  // in this order a NaN is kept
    const __m512 silu = _mm512_div_ps(value, _mm512_add_ps(one, power));
    _mm512_storeu_ps(y + i, _mm512_mul_ps(silu, _mm512_loadu_ps(up + i)));
  }
}

AVX512 void rotate(float* head, const float* cosines, const float* sines, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += kLanes) {
    const __mmask16 mask = first_lanes(half - i);
    const __m512 left = _mm512_maskz_loadu_ps(mask, head + i), right = _mm512_maskz_loadu_ps(mask, head + half + i);
    const __m512 cosine = _mm512_maskz_loadu_ps(mask, cosines + i), sine = _mm512_maskz_loadu_ps(mask, sines + i);
    _mm512_mask_storeu_ps(head + i, mask, _mm512_fmsub_ps(left, cosine, _mm512_mul_ps(right, sine)));
    _mm512_mask_storeu_ps(head + half + i, mask, _mm512_fmadd_ps(right, cosine, _mm512_mul_ps(left, sine)));
  }
}
