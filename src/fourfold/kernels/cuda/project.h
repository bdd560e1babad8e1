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
// The A operand of them.  `zero` is 0, but the compiler must not know: the unit wants registers of the two rows interleaved, a
// 16-byte load gives one row's, and a plain copy is put before every product instead of here.
template <int CHUNKS> DEV void interleave(u32 (&r)[CHUNKS][8], const uint4 (&v)[CHUNKS][2], u32 zero) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      r[c][half] = v[c][half].x ^ zero; r[c][2 + half] = v[c][half].y ^ zero; r[c][4 + half] = v[c][half].z ^ zero; r[c][6 + half] = v[c][half].w ^ zero;
    }
}
template <int CHUNKS, int WIDTH> DEV void load_rows(u32 (&r)[CHUNKS][8], const u16* row0, const u16* row1, int q4, u32 zero) {
  uint4 v[CHUNKS][2];
  fetch_rows<CHUNKS, WIDTH>(v, row0, row1, q4);
  interleave(r, v, zero);
}
// 16 rows times tiles j .. j + COUNT - 1 of the matrix in shared memory, as COUNT independent chains of products
template <int CHUNKS, int COUNT> DEV void multiply(float (*d)[4], const u32 (&r)[CHUNKS][8], u32 matrix, int j, int lane) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    uint4 w[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) w[i] = lds128(matrix + (((j + i) * CHUNKS + c) * 32 + lane) * 16);
#pragma unroll
    for (int i = 0; i < COUNT; i++) mma_act(d[i], r[c][0], r[c][1], r[c][2], r[c][3], w[i].x, w[i].y);
#pragma unroll
    for (int i = 0; i < COUNT; i++) mma_act(d[i], r[c][4], r[c][5], r[c][6], r[c][7], w[i].z, w[i].w);
  }
}
template <int BYTES, int THREADS> DEV void load_matrix(u32 dst, const void* src) {
#pragma unroll 4
  for (int i = threadIdx.x * 16; i < BYTES; i += THREADS * 16) copy16(dst + i, (const char*)src + i);
  copy_commit();
}
