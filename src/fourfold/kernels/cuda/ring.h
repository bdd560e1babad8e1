// The ring of a warp of decode.cu in shared memory: ST stages of NT tiles of 16 tokens, their codes in rows that ldmatrix
// reads without bank conflicts, and their scales.  Needs D, DV, NT, NW and ST as decode.cu has them.
#pragma once
#include "mma.h"

constexpr int CK = (D + 31) / 32, CV = (DV + 31) / 32;  // 16-byte chunks of a row in shared memory
constexpr int RK = 16 * CK, RV = 16 * CV;
constexpr int TILE = 16 * NT, UNIT = NW * TILE;
constexpr int KB = 16 * RK, VB = 16 * RV;              // bytes of 16 tokens
constexpr int STAGE = NT * (KB + VB), SCALES = NT * 64;
constexpr int EXCHANGE = NW > 1 ? 1024 * CV : 0, STATS = NW > 1 ? 128 : 0;  // bytes a warp to merge warps, in the ring's last stages
constexpr int COPIES = ST * STAGE > EXCHANGE ? ST * STAGE : EXCHANGE;
constexpr int RING = COPIES + (ST - 1) * SCALES + (SCALES > STATS ? SCALES : STATS);  // bytes a warp
constexpr int EARLY = (COPIES - EXCHANGE) / STAGE < ST - 1 ? (COPIES - EXCHANGE) / STAGE : ST - 1;  // stages free meanwhile

// swizzle of 16-byte chunks inside 128-byte lines that makes every ldmatrix here free of bank conflicts
template <int R> DEV u32 swizzle(u32 o) {
  constexpr int shift = R == 128 ? 8 : 7;
  constexpr u32 mask = R == 48 ? 1 : (R == 32 || R == 96) ? 3 : 7;
  return o ^ (((o >> shift) & mask) << 4);
}
// offset of the row that this lane names to ldmatrix number i (chunks 2i, 2i+1 of even and odd tokens)
template <int R, int C> DEV u32 matrix_row(int i, int lane) {
  const int m = lane >> 3, chunk = min(2 * i + (m >> 1), C - 1), token = 2 * (lane & 7) + (m & 1);
  return swizzle<R>(token * R + 16 * chunk);
}
// copy 16 rows of N bytes, contiguous at src, to rows of R bytes
template <int N, int R> DEV void copy_rows(u32 dst, const u8* src, int lane) {
  if constexpr (N == R) {
#pragma unroll
    for (int i = 0; i < (R + 31) / 32; i++) {
      const int c = lane + 32 * i;
      if (R % 32 == 0 || c < R) copy16(dst + swizzle<R>(16 * c), src + 16 * c);
    }
  } else {  // 40-byte rows: only 8-byte aligned
#pragma unroll
    for (int i = 0; i < (2 * N + 31) / 32; i++) {
      const int c = lane + 32 * i, t = c / (N / 8), o = c % (N / 8) * 8;
      if (c < 2 * N) copy8(dst + swizzle<R>(t * R + o), src + 8 * c);
    }
  }
}
