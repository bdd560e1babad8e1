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
// The A operand of a chunk.  `one` is 1, but the compiler must not know: the unit wants registers of the two rows interleaved, a
// 16-byte load gives one row's, and a plain copy is put before every product instead of here.  A product, since the other
// pipe is the busier one in store.cu.
DEV void interleave(u32 (&r)[8], const uint4 (&v)[2], u32 one) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    r[half] = v[half].x * one; r[2 + half] = v[half].y * one; r[4 + half] = v[half].z * one; r[6 + half] = v[half].w * one;
  }
}
template <int CHUNKS, int WIDTH> DEV void load_rows(u32 (&r)[CHUNKS][8], const u16* row0, const u16* row1, int q4, u32 one) {
  uint4 v[CHUNKS][2];
  fetch_rows<CHUNKS, WIDTH>(v, row0, row1, q4);
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) interleave(r[c], v[c], one);
}
// y = start + 16 rows times the matrix in shared memory, in fp16: y[h][j] is elements 8 j + 2 q, + 1 of row g + 8 h.
// The matrix is diag(M_0, M_1, ..) (H x I) with a Hadamard matrix H of OUTER rows (pack.py), of which the M are in memory:
// products inside each block of rows, then sums and differences of the blocks' results.  `start` (shared memory; of row
// g + 8 h, the same for all rows unless BY_ROW) is added before those, elements 2 q, + 1 of a tile twice for lane q.
template <int CHUNKS, int TILES, int OUTER, bool BY_ROW> DEV void multiply(u32 (&y)[2][TILES], const uint4 (&raw)[CHUNKS][2], u32 one, u32 matrix, const u32 (&start)[2], int lane) {
  constexpr int WIDE = TILES / OUTER, DEEP = CHUNKS / OUTER, AT_ONCE = WIDE % 4 ? 2 : 4;
#pragma unroll
  for (int o = 0; o < OUTER; o++) {
    float d[WIDE][4];
#pragma unroll
    for (int j = 0; j < WIDE; j++) {
      const int at = 64 * (o * WIDE + j) + 16 * (lane & 3);
      uint4 b;
      if (BY_ROW) {
        const uint2 low = lds64(start[0] + at), high = lds64(start[1] + at);
        b = make_uint4(low.x, low.y, high.x, high.y);
      } else {
        b = lds128(start[0] + at);
      }
      d[j][0] = __uint_as_float(b.x); d[j][1] = __uint_as_float(b.y); d[j][2] = __uint_as_float(b.z); d[j][3] = __uint_as_float(b.w);
    }
#pragma unroll
    for (int c = 0; c < DEEP; c++) {
      u32 r[8];
      interleave(r, raw[o * DEEP + c], one);
#pragma unroll
      for (int j = 0; j < WIDE; j += AT_ONCE) {  // consecutive products are independent
        uint4 w[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) w[i] = lds128(matrix + (((o * WIDE + j + i) * DEEP + c) * 32 + lane) * 16);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) mma_act(d[j + i], r[0], r[1], r[2], r[3], w[i].x, w[i].y);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) mma_act(d[j + i], r[4], r[5], r[6], r[7], w[i].z, w[i].w);
      }
    }
#pragma unroll
    for (int j = 0; j < WIDE; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) y[h][o * WIDE + j] = pack_half_finite(d[j][2 * h], d[j][2 * h + 1]);
  }
#pragma unroll
  for (int apart = 1; apart < OUTER; apart *= 2)
#pragma unroll
    for (int j = 0; j < TILES; j++)
      if (j / WIDE / apart % 2 == 0)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const u32 low = y[h][j], high = y[h][j + apart * WIDE];
          y[h][j] = add_half2(low, high); y[h][j + apart * WIDE] = sub_half2(low, high);
        }
}
template <int BYTES, int THREADS> DEV void load_matrix(u32 dst, const void* src) {
#pragma unroll 4
  for (int i = threadIdx.x * 16; i < BYTES; i += THREADS * 16) copy16(dst + i, (const char*)src + i);
  copy_commit();
}
