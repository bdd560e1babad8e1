// One row to codes and a scale: the CPU twin of quant/codec.py, code for code.
#pragma once
#include <algorithm>

#include "vec.h"

namespace ff {

constexpr float ZERO_POINT = 7.5f;  // layout.ZERO_POINT
constexpr int MAX_D = 256;

inline f8 round_code(f8 x, f8 inverse) {
  // same rounding as torch.round (half to even): adding 1.5 * 2^23 in float32
  const f8 shift = splat(12582912.f);
  const f8 c = (x * inverse + splat(ZERO_POINT) + shift) - shift;
  return minimum(maximum(c, splat(0.f)), splat(15.f));
}

// Chooses among `clips` the scale of least squared error, rounds, and fits the scale by least squares.  With `feedback` [n, n]
// each element's error is carried into the elements still to be rounded, and the scale stays.
// x has n elements (n % 8 == 0).  Writes n/2 bytes of codes and returns the float16 scale.
inline uint16_t quantise_row(const float* x, int n, const float* clips, int clip_count, const float* feedback,
                             uint8_t* codes) {
  f8 top = splat(0.f);
  for (int e = 0; e < n; e += 8) top = maximum(top, absolute(load(x + e)));
  const float peak = std::max(largest(top), 1e-8f);
  float best = INFINITY, scale = 0.f;
  for (int k = 0; k < clip_count; k++) {
    const float s = peak * clips[k] / ZERO_POINT;
    const f8 inverse = splat(1.f / s), sv = splat(s), zero = splat(ZERO_POINT);
    f8 error = splat(0.f);
    for (int e = 0; e < n; e += 8) {
      const f8 v = load(x + e), d = v - (round_code(v, inverse) - zero) * sv;
      error += d * d;
    }
    const float total = sum(error);
    if (total < best) best = total, scale = s;
  }
  float c[MAX_D];
  if (feedback == nullptr) {
    for (int e = 0; e < n; e += 8) store(c + e, round_code(load(x + e), splat(1.f / scale)));
  } else {
    // Row i of `feedback` holds, for j < i, how much of element i's error element j must absorb.  Last element first.
    float t[MAX_D];
    std::copy(x, x + n, t);
    const float inverse = 1.f / scale;
    for (int i = n - 1; i >= 0; i--) {
      const float code = std::min(std::max(std::nearbyint(t[i] * inverse + ZERO_POINT), 0.f), 15.f);
      c[i] = code;
      const f8 error = splat(x[i] - (code - ZERO_POINT) * scale);
      const float* row = feedback + (size_t)i * n;
      for (int j = 0; j < i; j += 8) store(t + j, load(t + j) + error * load(row + j));
    }
  }
  for (int j = 0; j < n / 2; j++) codes[j] = (uint8_t)((int)c[j] | ((int)c[j + n / 2] << 4));
  if (feedback != nullptr) return float_to_half(scale);
  f8 xc = splat(0.f), cc = splat(0.f);
  for (int e = 0; e < n; e += 8) {
    const f8 v = load(c + e) - splat(ZERO_POINT);
    xc += load(x + e) * v;
    cc += v * v;
  }
  return float_to_half(std::max(sum(xc) / sum(cc), 0.f));
}

}  // namespace ff
