// Rows of activations times a packed D x N matrix of one KV head, on the matrix unit.
//
// The matrix is packed on the host (pack.py) as [tile of 8 columns][chunk of 32 rows][lane][8 elements], which is what
// each lane feeds to the unit, and is copied to shared memory once a block.  A warp holds 16 rows in registers: lane
// (g, q) loads elements 32 c + 8 q .. + 7 of rows g and g + 8, 16 bytes at a time.
#pragma once
#include "mma.h"

// 16 rows from global memory; a row pointer may be null (then zeros).  Volatile: it stays where it is written, ahead of its use.
template <int CHUNKS, int WIDTH> DEV void fetch_rows(uint4 (&v)[CHUNKS][2], const u16* row0, const u16* row1, int q4) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u16* row = half ? row1 : row0;
      v[c][half] = make_uint4(0, 0, 0, 0);
      if (row && (WIDTH % 32 == 0 || 32 * c + 8 * q4 < WIDTH)) v[c][half] = ldg128(row + 32 * c + 8 * q4);
    }
}
// The A operand of them.  `one` is 1, but the compiler must not know: the unit wants registers of the two rows interleaved, a
// 16-byte load gives one row's, and a plain copy is put before every product instead of here.  A product, since the other
// pipe is the busier one in store.cu.
template <int CHUNKS> DEV void interleave(u32 (&r)[CHUNKS][8], const uint4 (&v)[CHUNKS][2], u32 one) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      r[c][half] = v[c][half].x * one; r[c][2 + half] = v[c][half].y * one; r[c][4 + half] = v[c][half].z * one; r[c][6 + half] = v[c][half].w * one;
    }
}
template <int CHUNKS, int WIDTH> DEV void load_rows(u32 (&r)[CHUNKS][8], const u16* row0, const u16* row1, int q4, u32 one) {
  uint4 v[CHUNKS][2];
  fetch_rows<CHUNKS, WIDTH>(v, row0, row1, q4);
  interleave(r, v, one);
}
// 16 rows times all tiles of the matrix in shared memory, chunk after chunk: consecutive products are independent.
// The matrix is diag(M_0, M_1, ..) (H x I) with a Hadamard matrix H of OUTER rows (pack.py), of which the M are in memory:
// products inside each block of rows, then sums and differences of the blocks' results.
template <int CHUNKS, int TILES, int OUTER> DEV void multiply(float (&d)[TILES][4], const u32 (&r)[CHUNKS][8], u32 matrix, int lane) {
  constexpr int AT_ONCE = TILES / OUTER % 4 ? 2 : 4, WIDE = TILES / OUTER, DEEP = CHUNKS / OUTER;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int j = c / DEEP * WIDE; j < (c / DEEP + 1) * WIDE; j += AT_ONCE) {
      uint4 w[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) w[i] = lds128(matrix + (((j + i) * DEEP + c % DEEP) * 32 + lane) * 16);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) mma_act(d[j + i], r[c][0], r[c][1], r[c][2], r[c][3], w[i].x, w[i].y);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) mma_act(d[j + i], r[c][4], r[c][5], r[c][6], r[c][7], w[i].z, w[i].w);
    }
#pragma unroll
  for (int apart = 1; apart < OUTER; apart *= 2)
#pragma unroll
    for (int j = 0; j < TILES; j++)
      if (j / WIDE / apart % 2 == 0)
#pragma unroll
        for (int v = 0; v < 4; v++) {
          const float low = d[j][v], high = d[j + apart * WIDE][v];
          d[j][v] = low + high; d[j + apart * WIDE][v] = low - high;
        }
}
template <int BYTES, int THREADS> DEV void load_matrix(u32 dst, const void* src) {
#pragma unroll 4
  for (int i = threadIdx.x * 16; i < BYTES; i += THREADS * 16) copy16(dst + i, (const char*)src + i);
  copy_commit();
}
