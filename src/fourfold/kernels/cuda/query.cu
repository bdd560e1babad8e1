// The query operand of decode.cu: q' = q Wq, scaled, in fp16 and in the order of the matrix unit.
//
// Compile-time: D, GROUP, SINK, ACT_BF16.  For each query row: 32 CK halves (zeros where D is padded), and
// aux = (-7.5 * 2^-24 * sum of q', score of the sink centre).  The 2^-4 of the high nibbles is in Wq.
#include "project.h"

constexpr int CHUNKS = (D + 31) / 32, N = 32 * CHUNKS, TILES = N / 8;

struct Args {
  const u16* q; i64 q_stride;                       // [tokens, H, D], elements a token
  const uint4* wq; const float* sink;               // packed [HK, TILES, CHUNKS, 32]; [HK, N] in the operand's order, or null
  u16* out; float2* aux;
  int tokens, kv_heads;
  float scale, sink_scale;
};

extern "C" __global__ void __launch_bounds__(128) query(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q4 = lane & 3, hk = blockIdx.y;
  const u32 matrix = smem_addr(smem);
  load_matrix<TILES * CHUNKS * 512, 128>(matrix, a.wq + (i64)hk * TILES * CHUNKS * 32);
  wait_predecessor();
  release_successor();
  const int n_rows = a.tokens * GROUP;
  bool loaded = false;
  for (int r0 = blockIdx.x * 64 + warp * 16; r0 - warp * 16 < n_rows; r0 += gridDim.x * 64) {
    i64 row[2]; const u16* src[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = r0 + g + 8 * h;
      row[h] = (i64)(r / GROUP) * a.kv_heads * GROUP + hk * GROUP + r % GROUP;
      src[h] = r < n_rows ? a.q + (r / GROUP) * a.q_stride + (hk * GROUP + r % GROUP) * D : nullptr;
    }
    u32 x[CHUNKS][8];
    load_rows<CHUNKS, D>(x, src[0], src[1], q4);
    if (!loaded) { copy_wait<0>(); __syncthreads(); loaded = true; }
    if (r0 >= n_rows) continue;
    float sum[2] = {0.f, 0.f}, sink[2] = {0.f, 0.f};
    u32 res[2][TILES];
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      float d[4] = {0.f, 0.f, 0.f, 0.f};
      multiply<CHUNKS>(d, x, matrix, j, lane);
      if (SINK) {
        const float2 u = *(const float2*)(a.sink + hk * N + q4 * (N / 4) + 2 * j);
        sink[0] += d[0] * u.x + d[1] * u.y; sink[1] += d[2] * u.x + d[3] * u.y;
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32 v = pack_half(fminf(fmaxf(d[2 * h] * a.scale, -65504.f), 65504.f), fminf(fmaxf(d[2 * h + 1] * a.scale, -65504.f), 65504.f));
        res[h][j] = v;
        sum[h] += (half_lo(v) + half_hi(v)) * (j & 1 ? 16.f : 1.f);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int o = 1; o < 4; o *= 2) { sum[h] += __shfl_xor_sync(FULL, sum[h], o); sink[h] += __shfl_xor_sync(FULL, sink[h], o); }
      if (!src[h]) continue;
      uint4* dst = (uint4*)(a.out + row[h] * N + q4 * (N / 4));
#pragma unroll
      for (int j = 0; j < TILES; j += 4) dst[j / 4] = make_uint4(res[h][j], res[h][j + 1], res[h][j + 2], res[h][j + 3]);
      if (q4 == 0) a.aux[row[h]] = make_float2(-7.5f * 5.9604644775390625e-08f * sum[h], sink[h] * a.sink_scale);
    }
  }
}
