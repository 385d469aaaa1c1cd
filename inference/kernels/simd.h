// AVX512 building blocks. Functions carry their instruction set as an attribute, so that this file may be compiled for
// any x86-64 and the rest of the library runs where these instructions are missing.
#pragma once

#include <immintrin.h>

#include "layout.h"

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")))
#define AVX512_INLINE AVX512 __attribute__((always_inline)) inline
#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")))

// Storage types of weights and cache; the tag tells the two 16-bit floats apart.
struct Float32 { using Item = float; static constexpr Format format = kFloat32; };
struct Bfloat16 { using Item = uint16_t; static constexpr Format format = kBfloat16; };
struct Float16 { using Item = uint16_t; static constexpr Format format = kFloat16; };

// The two neighbours of 16 lanes, from a pair tile.
AVX512_INLINE void load_pair(Float32, const float* tile, __m512& first, __m512& second) {
  first = _mm512_loadu_ps(tile);
  second = _mm512_loadu_ps(tile + kLanes);
}
AVX512_INLINE void load_pair(Bfloat16, const uint16_t* tile, __m512& first, __m512& second) {
  const __m512i both = _mm512_loadu_si512(tile);
  first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  second = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))));
}
AVX512_INLINE void load_pair(Float16, const uint16_t* tile, __m512& first, __m512& second) {
  first = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile)));
  second = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + kLanes)));
}

// Rounds to nearest even; a NaN stays one.
AVX512_INLINE __m256i to_bfloat16(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

AVX512_INLINE void store_lanes(Float32, __m512 value, float* lanes) { _mm512_storeu_ps(lanes, value); }
AVX512_INLINE void store_lanes(Bfloat16, __m512 value, uint16_t* lanes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), to_bfloat16(value));
}
AVX512_INLINE void store_lanes(Float16, __m512 value, uint16_t* lanes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

// The first `count` of 16 lanes; all for 16 and more, none for 0 and less.
AVX512_INLINE __mmask16 first_lanes(int count) {
  return count >= kLanes ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
}

// e to the x within 2 units in the last place; exactly 1 at 0, exactly 0 below -87, NaN stays NaN. x must be below 88.
// Source of the polynomial: Cephes library, expf.
AVX512_INLINE __m512 exp_lanes(__m512 x) {
  const __m512 low = _mm512_set1_ps(-87.0f);
  const __m512 clamped = _mm512_max_ps(low, x);  // in this order a NaN in x is kept
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clamped);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r), _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), p, n);
}
