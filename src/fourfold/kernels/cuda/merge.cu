// Merges the partial results of a query tile's runs, adds the sink centre, rotates the output back and adds the centre.
//
// Compile-time: DV, GROUP, SINK, ACT_BF16.  out = (sum_i 2^(m_i - M) (acc_i + p0_i sink) / Z) Wo + centre.
// A block of 8 warps takes up to 16 query rows of one KV head at a time, so that the matrix is read once for many; the
// rotation runs on the matrix unit with the rows split into two parts (high and low, through shared memory), which keeps
// 16 bits of each.
// The matrix and the plan are read before the wait for decode.cu; partials are read without waiting for their weights.
#include "mma.h"

constexpr int CHUNKS = (DV + 31) / 32, TILES = DV / 8, PITCH = 32 * CHUNKS + 8, HALF_PITCH = 16 * CHUNKS + 4;
constexpr int VEC = (DV + 63) / 64, BATCH = VEC == 1 ? 8 : VEC == 2 ? 4 : 2;  // float4s of a lane in a row; partials on their way at once
constexpr int OWN = (TILES + 7) / 8;
constexpr bool AHEAD = OWN * CHUNKS <= 9;           // the matrix fits in registers

struct Args {
  const float* po; const float* pm;                 // as written by decode.cu
  const int4* tiles; const int* cum; const int* tile_of; const int* meta; // see plan.cu
  const uint4* wo; const float* centre; const float* sink; // packed [TILES, CHUNKS, 32 lanes], [HK, DV], [HK, DV] or null
  u16* out; i64 out_stride;                         // [tokens, H, DV], elements a token
  int tokens, rows, slots, take, sharers;           // rows of a tile; query rows a block takes and teams a row; powers of two
                                                    // whose product is at most 16
};

extern "C" __global__ void __launch_bounds__(256, AHEAD ? 2 : 1) merge(const __grid_constant__ Args a) {
  __shared__ float o[16 * PITCH];
  __shared__ __align__(16) u32 split[2][16 * HALF_PITCH];  // high and low parts, two elements a word
  __shared__ float4 stat[16];                              // of each team: maximum, sum, weight of token 0
  __shared__ bool some[16];                                // whether a row has any keys
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q4 = lane & 3;
  // a team of 16 lanes takes a row, or a share of its partial results
  const int team = threadIdx.x >> 4, r_own = team % a.take, share = team / a.take, first = 4 * (threadIdx.x & 15);
  const int hk = blockIdx.y, per = a.meta[0], extra = a.meta[1], total = a.tokens * GROUP;
  uint4 w[AHEAD ? OWN : 1][AHEAD ? CHUNKS : 1];
  if constexpr (AHEAD) {
#pragma unroll
    for (int i = 0; i < OWN; i++)
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) w[i][c] = __ldg(a.wo + (min(warp + 8 * i, TILES - 1) * CHUNKS + c) * 32 + lane);
  }
  int tile, count;  // of this lane's row: -1 if it is no row; partial results, the first of them at `at`
  i64 at;
  auto locate = [&](int v0) {
    tile = -1; count = 0; at = 0;
    if (v0 + r_own >= total || share >= a.sharers) return;
    const int token = (v0 + r_own) / GROUP;
    tile = a.tile_of[token];
    if (tile < 0) return;
    const int c0 = a.cum[tile], c1 = a.cum[tile + 1], shift = extra * (tile + 1), row = (token - a.tiles[tile].z) * GROUP + (v0 + r_own) % GROUP;
    if (c1 == c0) return;
    const int w0 = (c0 + shift) / per;
    count = (c1 - 1 + shift) / per - w0 + 1;
    at = ((i64)hk * a.slots + w0 + tile) * a.rows + row;
  };
  locate(blockIdx.x * a.take);
  for (int v0 = blockIdx.x * a.take; v0 < total; v0 += gridDim.x * a.take) {
    const int n_rows = min(a.take, total - v0);
    wait_predecessor();
    release_successor();
    float top = -1e30f, acc[VEC][4], z = 0.f, p0 = 0.f;
#pragma unroll
    for (int c = 0; c < VEC; c++) acc[c][0] = acc[c][1] = acc[c][2] = acc[c][3] = 0.f;
    for (int i0 = share; i0 < count; i0 += a.sharers * BATCH) {
      float4 v[BATCH][VEC], st[BATCH];
#pragma unroll
      for (int k = 0; k < BATCH; k++) {
        const int i = i0 + k * a.sharers;
        st[k] = i < count ? __ldcg((const float4*)a.pm + at + (i64)i * a.rows) : make_float4(-1e30f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int c = 0; c < VEC; c++) {
          const int e = first + 64 * c;
          v[k][c] = i < count && e < DV ? __ldcg((const float4*)(a.po + (at + (i64)i * a.rows) * DV + e)) : make_float4(0.f, 0.f, 0.f, 0.f);
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
    const bool any = __syncthreads_or(tile >= 0);  // not all padding; the last rows' shared memory is free
    // four elements of a row, normalised, as the high and low parts that the matrix unit takes
    auto put = [&](int r, int e, float4 v, float z, float p0) {
      const float s = z > 0.f ? 1.f / z : 0.f;
      if (SINK && e < DV) {
        const float4 u = *(const float4*)(a.sink + hk * DV + e);
        v.x += p0 * u.x; v.y += p0 * u.y; v.z += p0 * u.z; v.w += p0 * u.w;
      }
      const u32 h0 = pack_act(v.x * s, v.y * s), h1 = pack_act(v.z * s, v.w * s);
      *(uint2*)(split[0] + r * HALF_PITCH + e / 2) = make_uint2(h0, h1);
      *(uint2*)(split[1] + r * HALF_PITCH + e / 2) =
          make_uint2(pack_act(v.x * s - act_lo(h0), v.y * s - act_hi(h0)), pack_act(v.z * s - act_lo(h1), v.w * s - act_hi(h1)));
    };
    if (a.sharers == 1) {
      if (share == 0) {
#pragma unroll
        for (int c = 0; c < VEC; c++) if (first + 64 * c < 32 * CHUNKS) put(r_own, first + 64 * c, make_float4(acc[c][0], acc[c][1], acc[c][2], acc[c][3]), z, p0);
        if (first == 0) some[r_own] = z > 0.f;
      }
      locate(v0 + gridDim.x * a.take);  // the next rows; on its way during the rotation
    } else {  // bring a row's teams to one maximum
#pragma unroll
      for (int c = 0; c < VEC; c++) if (first + 64 * c < 32 * CHUNKS) *(float4*)(o + team * PITCH + first + 64 * c) = make_float4(acc[c][0], acc[c][1], acc[c][2], acc[c][3]);
      if (first == 0) stat[team] = make_float4(top, z, p0, 0.f);
      locate(v0 + gridDim.x * a.take);
      __syncthreads();
      for (int i = threadIdx.x; i < n_rows * 8 * CHUNKS; i += 256) {
        const int r = i / (8 * CHUNKS), e = i % (8 * CHUNKS) * 4, end = a.sharers * a.take;
        float high = -1e30f;
        for (int s = r; s < end; s += a.take) high = fmaxf(high, stat[s].x);
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f), sum = v;
        for (int s = r; s < end; s += a.take) {
          const float4 t = stat[s], w = *(const float4*)(o + s * PITCH + e);
          const float f = exp2_(t.x - high);
          sum.y += f * t.y; sum.z += f * t.z;
          v.x += f * w.x; v.y += f * w.y; v.z += f * w.z; v.w += f * w.w;
        }
        put(r, e, v, sum.y, sum.z);
        if (e == 0) some[r] = sum.y > 0.f;
      }
    }
    if (!any) continue;
    __syncthreads();
    // ---- rotate: rows are the M side; rows past n_rows stay zero
    bool live[2];
#pragma unroll
    for (int half = 0; half < 2; half++) live[half] = g + 8 * half < n_rows && a.tile_of[(v0 + g + 8 * half) / GROUP] >= 0;
    float d[OWN][4];
#pragma unroll
    for (int i = 0; i < OWN; i++) d[i][0] = d[i][1] = d[i][2] = d[i][3] = 0.f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int p = 0; p < 2; p++) {
        u32 part[8];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          uint4 v = make_uint4(0, 0, 0, 0);
          if (g + 8 * half < n_rows) v = *(const uint4*)(split[p] + (g + 8 * half) * HALF_PITCH + 16 * c + 4 * q4);
          part[half] = v.x; part[2 + half] = v.y; part[4 + half] = v.z; part[6 + half] = v.w;
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) {
          uint4 m;
          if constexpr (AHEAD) m = w[i][c]; else m = __ldg(a.wo + (min(warp + 8 * i, TILES - 1) * CHUNKS + c) * 32 + lane);
          mma_act(d[i], part[0], part[1], part[2], part[3], m.x, m.y);
          mma_act(d[i], part[4], part[5], part[6], part[7], m.z, m.w);
        }
      }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int j = warp + 8 * i;
      if (j >= TILES) break;
      const int e = 8 * j + 2 * q4;
      const float2 centre = *(const float2*)(a.centre + hk * DV + e);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int r = g + 8 * half, token = (v0 + r) / GROUP;
        if (!live[half]) continue;
        const bool any = some[r];                              // a sequence of length 0 gives zeros
        const u32 v = any ? pack_act(d[i][2 * half] + centre.x, d[i][2 * half + 1] + centre.y) : 0;
        *(u32*)(a.out + token * a.out_stride + (hk * GROUP + (v0 + r) % GROUP) * DV + e) = v;
      }
    }
  }
  wait_predecessor();  // a grid must not end before its predecessor
}
