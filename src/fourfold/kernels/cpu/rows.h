// Rows of up to MAX_D floats: reading and writing any dtype, and the product with a head's matrix.
#pragma once
#include "paged.h"
#include "quantise.h"
#include "vec.h"

namespace ff {

// y[r] = x[r] A for R rows; A is [n, n] row-major, n a multiple of 16
template <int R>
inline void multiply_rows(const float (*x)[MAX_D], int n, const float* A, float (*y)[MAX_D]) {
  for (int e = 0; e < n; e += 16) {
    f8 acc[R][2] = {};
    for (int d = 0; d < n; d++) {
      const f8 a0 = load(A + (size_t)d * n + e), a1 = load(A + (size_t)d * n + e + 8);
      for (int r = 0; r < R; r++) {
        const f8 b = splat(x[r][d]);
        acc[r][0] += b * a0;
        acc[r][1] += b * a1;
      }
    }
    for (int r = 0; r < R; r++) store(y[r] + e, acc[r][0]), store(y[r] + e + 8, acc[r][1]);
  }
}

inline void multiply(const float (*x)[MAX_D], int rows, int n, const float* A, float (*y)[MAX_D]) {
  switch (rows) {
    case 1: return multiply_rows<1>(x, n, A, y);
    case 2: return multiply_rows<2>(x, n, A, y);
    case 3: return multiply_rows<3>(x, n, A, y);
    default: return multiply_rows<4>(x, n, A, y);
  }
}

inline void read_row(const void* p, int64_t at, int dtype, int n, float* x) {
  if (dtype == FF_FLOAT32) {
    std::memcpy(x, (const float*)p + at, 4 * n);
  } else if (dtype == FF_BFLOAT16) {
    const uint16_t* b = (const uint16_t*)p + at;
    for (int e = 0; e < n; e++) {
      const uint32_t w = (uint32_t)b[e] << 16;
      std::memcpy(x + e, &w, 4);
    }
  } else {
    for (int e = 0; e < n; e += 8) store(x + e, halves((const uint16_t*)p + at + e));
  }
}

inline void write_row(void* p, int64_t at, int dtype, int n, const float* x) {
  if (dtype == FF_FLOAT32) {
    std::memcpy((float*)p + at, x, 4 * n);
  } else if (dtype == FF_BFLOAT16) {
    uint16_t* b = (uint16_t*)p + at;
    for (int e = 0; e < n; e++) {
      uint32_t w;
      std::memcpy(&w, x + e, 4);
      b[e] = x[e] != x[e] ? 0x7fc0 : (uint16_t)((w + 0x7fff + ((w >> 16) & 1)) >> 16);
    }
  } else {
    for (int e = 0; e < n; e++) ((uint16_t*)p)[at + e] = float_to_half(x[e]);
  }
}

}  // namespace ff
