// The query operand of decode.cu: q' = q Wq, scaled, in fp16 and in the order of the matrix unit.
//
// Compile-time: D, GROUP, SINK, ACT_BF16.  For each query row: 32 CK halves (zeros where D is padded), and
// aux = (-7.5 * 2^-24 * sum of q', score of the sink centre).  The 2^-4 of the high nibbles is in Wq.
// A warp keeps its share of the columns of Wq in registers and walks over blocks of 16 rows.
// What follows may read pages at once, so everything queued before must have ended when this kernel lets it start.
// Right behind store.cu (after_store) the two run side by side: store starts nothing before what made q has ended, and
// this kernel waits for it at its own end.  Otherwise it is launched to start after all earlier work.
#include "project.h"

constexpr int CHUNKS = (D + 31) / 32, N = 32 * CHUNKS, TILES = N / 8, WARPS = D > 128 ? 8 : 4, OWN = TILES / WARPS;

struct Args {
  const u16* q; i64 q_stride;                       // [tokens, H, D], elements a token
  const uint4* wq; const float* sink;               // packed [HK, TILES, CHUNKS, 32]; [HK, N] in the operand's order, or null
  u16* out; float2* aux;
  int tokens, kv_heads, after_store;
  float scale, sink_scale;
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) query(const __grid_constant__ Args a) {
  __shared__ float2 sums[2][WARPS][16];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q4 = lane & 3, hk = blockIdx.y;
  uint4 w[OWN][CHUNKS];
#pragma unroll
  for (int j = 0; j < OWN; j++)
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) w[j][c] = __ldg(a.wq + ((i64)(hk * TILES + warp * OWN + j) * CHUNKS + c) * 32 + lane);
  if (!a.after_store) { wait_predecessor(); release_successor(); }
  const int n_rows = a.tokens * GROUP;
  int turn = 0;
  for (int r0 = blockIdx.x * 16; r0 < n_rows; r0 += gridDim.x * 16, turn ^= 1) {
    i64 row[2]; const u16* src[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = r0 + g + 8 * h;
      row[h] = (i64)(r / GROUP) * a.kv_heads * GROUP + hk * GROUP + r % GROUP;
      src[h] = r < n_rows ? a.q + (r / GROUP) * a.q_stride + (hk * GROUP + r % GROUP) * D : nullptr;
    }
    u32 x[CHUNKS][8];
    load_rows<CHUNKS, D>(x, src[0], src[1], q4, 1 + ((u32)a.tokens >> 31));
    float sum[2] = {0.f, 0.f}, sink[2] = {0.f, 0.f};
    u32 res[2][OWN];
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        mma_act(d, x[c][0], x[c][1], x[c][2], x[c][3], w[j][c].x, w[j][c].y);
        mma_act(d, x[c][4], x[c][5], x[c][6], x[c][7], w[j][c].z, w[j][c].w);
      }
      const int tile = warp * OWN + j;
      if (SINK) {
        const float2 u = *(const float2*)(a.sink + hk * N + q4 * (N / 4) + 2 * tile);
        sink[0] += d[0] * u.x + d[1] * u.y; sink[1] += d[2] * u.x + d[3] * u.y;
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32 v = pack_half(fminf(fmaxf(d[2 * h] * a.scale, -65504.f), 65504.f), fminf(fmaxf(d[2 * h + 1] * a.scale, -65504.f), 65504.f));
        res[h][j] = v;
        sum[h] += (half_lo(v) + half_hi(v)) * (tile & 1 ? 16.f : 1.f);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int o = 1; o < 4; o *= 2) { sum[h] += __shfl_xor_sync(FULL, sum[h], o); sink[h] += __shfl_xor_sync(FULL, sink[h], o); }
      if (q4 == 0) sums[turn][warp][g + 8 * h] = make_float2(sum[h], sink[h]);
      if (!src[h]) continue;
      u32* dst = (u32*)(a.out + row[h] * N + q4 * (N / 4)) + warp * OWN;
      if constexpr (OWN == 4) *(uint4*)dst = make_uint4(res[h][0], res[h][1], res[h][2], res[h][3]);
      else {
#pragma unroll
        for (int j = 0; j < OWN; j++) dst[j] = res[h][j];
      }
    }
    __syncthreads();  // the two turns of `sums` make one barrier enough
    const int r = r0 + threadIdx.x;
    if (threadIdx.x < 16 && r < n_rows) {
      float2 total = make_float2(0.f, 0.f);
#pragma unroll
      for (int i = 0; i < WARPS; i++) { total.x += sums[turn][i][threadIdx.x].x; total.y += sums[turn][i][threadIdx.x].y; }
      a.aux[(i64)(r / GROUP) * a.kv_heads * GROUP + hk * GROUP + r % GROUP] =
          make_float2(-7.5f * 5.9604644775390625e-08f * total.x, total.y * a.sink_scale);
    }
  }
  if (a.after_store) { wait_predecessor(); release_successor(); }
}
