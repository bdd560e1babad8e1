// Merges the partial results of a query tile's runs, adds the sink centre, rotates the output back and adds the centre.
//
// Compile-time: DV, GROUP, SINK, ACT_BF16.  out = (sum_i 2^(m_i - M) (acc_i + p0_i sink) / Z) Wo + centre.
// A block of 8 warps takes up to 16 query rows of one KV head at a time, so that the matrix is read once for many; the
// rotation runs on the matrix unit with the rows split into two parts (high and low, through shared memory), which keeps
// 16 bits of each.
// The matrix and the plan are read before the wait for decode.cu; partials are read without waiting for their weights.
#include "mma.h"

constexpr int CHUNKS = (DV + 31) / 32, TILES = DV / 8, PITCH = 32 * CHUNKS + 8, HALF_PITCH = 16 * CHUNKS + 4, VEC = (DV + 127) / 128;
constexpr int OWN = (TILES + 7) / 8, BATCH = VEC == 1 ? 8 : 4;
constexpr bool AHEAD = OWN * CHUNKS <= 9;           // the matrix fits in registers

struct Args {
  const float* po; const float* pm;                 // as written by decode.cu
  const int4* tiles; const int* cum; const int* tile_of; const int* meta; // see plan.cu
  const uint4* wo; const float* centre; const float* sink; // packed [TILES, CHUNKS, 32 lanes], [HK, DV], [HK, DV] or null
  u16* out; i64 out_stride;                         // [tokens, H, DV], elements a token
  int tokens, rows, slots, take;                    // rows of a tile; query rows a block takes (a power of two <= 16)
};

extern "C" __global__ void __launch_bounds__(256, 2) merge(const __grid_constant__ Args a) {
  __shared__ float o[16 * PITCH];
  __shared__ __align__(16) u32 split[2][16 * HALF_PITCH];  // high and low parts, two elements a word
  __shared__ float stat[16][2];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q4 = lane & 3;
  const int hk = blockIdx.y, sharers = max(8 / a.take, 1);
  const int wide = 8 / sharers;                     // rows at a time; `sharers` warps share one row, by runs
  uint4 w[AHEAD ? OWN : 1][AHEAD ? CHUNKS : 1];
  if constexpr (AHEAD) {
#pragma unroll
    for (int i = 0; i < OWN; i++)
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) w[i][c] = __ldg(a.wo + (min(warp + 8 * i, TILES - 1) * CHUNKS + c) * 32 + lane);
  }
  const int per = a.meta[0], total = a.tokens * GROUP;
  for (int v0 = blockIdx.x * a.take; v0 < total; v0 += gridDim.x * a.take) {
    const int n_rows = min(a.take, total - v0);
    for (int i = threadIdx.x; i < n_rows * PITCH; i += 256) o[i] = 0.f;
    if (threadIdx.x < 32) stat[0][threadIdx.x] = 0.f;
    if (!__syncthreads_or(threadIdx.x < n_rows && a.tile_of[(v0 + threadIdx.x) / GROUP] >= 0)) continue;  // padding
    for (int r = warp % wide; r < n_rows; r += wide) {
      const int token = (v0 + r) / GROUP, tile = a.tile_of[token];
      int c0 = 0, c1 = 0, row = 0;
      if (tile >= 0) { c0 = a.cum[tile]; c1 = a.cum[tile + 1]; row = (token - a.tiles[tile].z) * GROUP + (v0 + r) % GROUP; }
      wait_predecessor();
      release_successor();
      if (c1 == c0) continue;
      const int w0 = c0 / per, count = (c1 - 1) / per - w0 + 1, stride = a.rows;
      const i64 at = ((i64)hk * a.slots + w0 + tile) * stride + row;
      const float4* pm = (const float4*)a.pm;
      float top = -1e30f, acc[VEC][4], z = 0.f, p0 = 0.f;
#pragma unroll
      for (int c = 0; c < VEC; c++) acc[c][0] = acc[c][1] = acc[c][2] = acc[c][3] = 0.f;
      for (int i0 = warp / wide; i0 < count; i0 += sharers * BATCH) {
        float4 v[BATCH][VEC], st[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
          const int i = i0 + k * sharers;
          st[k] = i < count ? __ldcg(pm + at + (i64)i * stride) : make_float4(-1e30f, 0.f, 0.f, 0.f);
#pragma unroll
          for (int c = 0; c < VEC; c++) {
            const int e = 4 * lane + 128 * c;
            v[k][c] = i < count && e < DV ? __ldcg((const float4*)(a.po + (at + (i64)i * stride) * DV + e)) : make_float4(0.f, 0.f, 0.f, 0.f);
          }
        }
        float high = top;
#pragma unroll
        for (int k = 0; k < BATCH; k++) high = fmaxf(high, st[k].x);
        const float keep = exp2_(top - high);
        top = high; z *= keep; p0 *= keep;
#pragma unroll
        for (int c = 0; c < VEC; c++) { acc[c][0] *= keep; acc[c][1] *= keep; acc[c][2] *= keep; acc[c][3] *= keep; }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
          const float f = exp2_(st[k].x - top);
          z += f * st[k].y; p0 += f * st[k].z;
#pragma unroll
          for (int c = 0; c < VEC; c++) { acc[c][0] += f * v[k][c].x; acc[c][1] += f * v[k][c].y; acc[c][2] += f * v[k][c].z; acc[c][3] += f * v[k][c].w; }
        }
      }
      if (sharers == 1) {
#pragma unroll
        for (int c = 0; c < VEC; c++) { const int e = 4 * lane + 128 * c; if (e < DV) *(float4*)(o + r * PITCH + e) = make_float4(acc[c][0], acc[c][1], acc[c][2], acc[c][3]); }
        if (lane == 0) { stat[r][0] = z; stat[r][1] = p0; }
      } else {  // then one row a warp, and all warps are here: bring the sharers to one maximum
        __shared__ float tops[8];
        if (lane == 0) tops[warp] = top;
        asm volatile("bar.sync %0, %1;" ::"r"(1 + r), "r"(32 * sharers) : "memory");
        float high = top;
        for (int s = 0; s < sharers; s++) high = fmaxf(high, tops[s * wide + r]);
        const float keep = exp2_(top - high);
#pragma unroll
        for (int c = 0; c < VEC; c++) { const int e = 4 * lane + 128 * c;
          if (e < DV)
#pragma unroll
            for (int x = 0; x < 4; x++) atomicAdd(o + r * PITCH + e + x, acc[c][x] * keep); }
        if (lane == 0) { atomicAdd(&stat[r][0], z * keep); atomicAdd(&stat[r][1], p0 * keep); }
      }
    }
    wait_predecessor();
    __syncthreads();
    for (int i = threadIdx.x; i < n_rows * 16 * CHUNKS; i += 256) {
      const int r = i / (16 * CHUNKS), e = i % (16 * CHUNKS) * 2;
      const float s = stat[r][0] > 0.f ? 1.f / stat[r][0] : 0.f;
      float2 v = *(const float2*)(o + r * PITCH + e);
      if (SINK && (DV % 32 == 0 || e < DV)) {
        const float2 u = *(const float2*)(a.sink + hk * DV + e);
        v.x += stat[r][1] * u.x; v.y += stat[r][1] * u.y;
      }
      v.x *= s; v.y *= s;
      const u32 h = pack_act(v.x, v.y);
      split[0][r * HALF_PITCH + e / 2] = h; split[1][r * HALF_PITCH + e / 2] = pack_act(v.x - act_lo(h), v.y - act_hi(h));
    }
    __syncthreads();
    // ---- rotate: rows are the M side; rows past n_rows stay zero
    u32 part[2][CHUNKS][8];
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
      for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          uint4 v = make_uint4(0, 0, 0, 0);
          if (g + 8 * half < n_rows) v = *(const uint4*)(split[p] + (g + 8 * half) * HALF_PITCH + 16 * c + 4 * q4);
          part[p][c][half] = v.x; part[p][c][2 + half] = v.y; part[p][c][4 + half] = v.z; part[p][c][6 + half] = v.w;
        }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int j = warp + 8 * i;
      if (j >= TILES) break;
      float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        uint4 m;
        if constexpr (AHEAD) m = w[i][c]; else m = __ldg(a.wo + (j * CHUNKS + c) * 32 + lane);
#pragma unroll
        for (int p = 0; p < 2; p++) {
          mma_act(d, part[p][c][0], part[p][c][1], part[p][c][2], part[p][c][3], m.x, m.y);
          mma_act(d, part[p][c][4], part[p][c][5], part[p][c][6], part[p][c][7], m.z, m.w);
        }
      }
      const int e = 8 * j + 2 * q4;
      const float2 centre = *(const float2*)(a.centre + hk * DV + e);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int r = g + 8 * half, token = (v0 + r) / GROUP;
        if (r >= n_rows || a.tile_of[token] < 0) continue;
        const bool any = stat[r][0] > 0.f;                     // a sequence of length 0 gives zeros
        const u32 v = any ? pack_act(d[2 * half] + centre.x, d[2 * half + 1] + centre.y) : 0;
        *(u32*)(a.out + token * a.out_stride + (hk * GROUP + (v0 + r) % GROUP) * DV + e) = v;
      }
    }
    __syncthreads();
  }
  wait_predecessor();  // a grid must not end before its predecessor
}
