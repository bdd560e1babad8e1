// Eight-lane vectors, float16 and exp: GCC/Clang vector extensions, with x86 intrinsics where they are much better.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ff {

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8x __attribute__((vector_size(32)));

inline f8 load(const float* p) {
  f8 v;
  std::memcpy(&v, p, 32);
  return v;
}
inline i8 load_words(const uint8_t* p) {
  i8 v;
  std::memcpy(&v, p, 32);
  return v;
}
inline void store(float* p, f8 v) { std::memcpy(p, &v, 32); }
inline f8 splat(float x) { return f8{x, x, x, x, x, x, x, x}; }
inline i8 splat_i(int x) { return i8{x, x, x, x, x, x, x, x}; }
inline f8 to_float(i8 v) { return __builtin_convertvector(v, f8); }
inline f8 blend(i8 mask, f8 yes, f8 no) { return (f8)((mask & (i8)yes) | (~mask & (i8)no)); }
inline f8 minimum(f8 a, f8 b) { return blend(a < b, a, b); }
inline f8 maximum(f8 a, f8 b) { return blend(a > b, a, b); }
inline f8 absolute(f8 a) { return (f8)((i8)a & splat_i(0x7fffffff)); }

inline float sum(f8 v) {
#if defined(__AVX2__)
  const __m128 a = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  const __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
#else
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
#endif
}

inline float largest(f8 v) {
  float m = v[0];
  for (int i = 1; i < 8; i++) m = v[i] > m ? v[i] : m;
  return m;
}

// sums of eight vectors at once: lane j of the result is sum(v[j])
inline f8 sums(const f8 (&v)[8]) {
#if defined(__AVX2__)
  const __m256 a = _mm256_hadd_ps((__m256)v[0], (__m256)v[1]), b = _mm256_hadd_ps((__m256)v[2], (__m256)v[3]);
  const __m256 c = _mm256_hadd_ps((__m256)v[4], (__m256)v[5]), d = _mm256_hadd_ps((__m256)v[6], (__m256)v[7]);
  const __m256 ab = _mm256_hadd_ps(a, b), cd = _mm256_hadd_ps(c, d);
  return (f8)_mm256_add_ps(_mm256_permute2f128_ps(ab, cd, 0x20), _mm256_permute2f128_ps(ab, cd, 0x31));
#else
  f8 r;
  for (int j = 0; j < 8; j++) r[j] = sum(v[j]);
  return r;
#endif
}

inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
  uint32_t w;
  float f;
  if (exponent == 31) {
    w = sign | 0x7f800000 | (mantissa << 13);
  } else if (exponent == 0) {
    f = std::ldexp((float)mantissa, -24);
    std::memcpy(&w, &f, 4);
    w |= sign;
  } else {
    w = sign | ((exponent + 112) << 23) | (mantissa << 13);
  }
  std::memcpy(&f, &w, 4);
  return f;
#endif
}

inline uint16_t float_to_half(float f) {
#if defined(__F16C__)
  return (uint16_t)_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t w;
  std::memcpy(&w, &f, 4);
  const uint16_t sign = (uint16_t)((w >> 16) & 0x8000);
  const float a = std::fabs(f);
  if (!(a < 65520.f)) return sign | (a != a ? 0x7e00 : 0x7c00);
  if (a < 6.103515625e-5f) return sign | (uint16_t)std::lrintf(a * 16777216.f);  // subnormal: units of 2^-24
  std::memcpy(&w, &a, 4);
  w += 0xfff + ((w >> 13) & 1);
  return sign | (uint16_t)((w >> 13) - (112 << 10));
#endif
}

inline f8 halves(const uint16_t* p) {
#if defined(__F16C__)
  return (f8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  f8 v;
  for (int i = 0; i < 8; i++) v[i] = half_to_float(p[i]);
  return v;
#endif
}

// exp for x <= 0 (softmax after the maximum is taken off): 2^n * polynomial, relative error below 2e-7; -inf gives 0
inline f8 exp_nonpositive(f8 x) {
  x = maximum(x, splat(-87.f));
  const f8 shift = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const f8 n = (x * splat(1.44269504088896341f) + shift) - shift;
  f8 r = x - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  f8 p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.f);
  const f8 result = (f8)((i8)p + (__builtin_convertvector(n, i8) << 23));
  return blend(x <= splat(-87.f), splat(0.f), result);
}

}  // namespace ff
