// Pages to dense rows, for prefill: [tokens, HK, D] keys and [tokens, HK, DV] values in the transformed basis.
//
// Compile-time: D, DV, PS, ACT_BF16.  blockIdx: (groups of 16 tokens, KV head, sequence); 4 warps, 4 rows of each a warp.
// Token t of sequence b, begin <= t < min(end, lengths[b]), goes to row start[b] + t - begin.
#include "mma.h"

struct Args {
  const u8* cache; i64 page_stride, head_stride;
  const int* table; int table_stride;
  const int* lengths; const int* start;
  const float* sink_key; const float* sink_value;   // [HK, D], [HK, DV] added to token 0, or null
  u16* key; u16* value;
  int kv_heads, begin, end;
};

// a row of N / 2 bytes to N elements; a lane takes 4 bytes: elements 4 i .. + 3 and N / 2 + 4 i .. + 3
template <int N> DEV void expand(const u8* src, float scale, const float* sink, u16* dst, int lane) {
  for (int i = lane; i < N / 8; i += 32) {
    const u32 w = *(const u32*)(src + 4 * i);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float v[4];
#pragma unroll
      for (int x = 0; x < 4; x++) {
        v[x] = ((float)(w >> (8 * x + 4 * half) & 15u) - 7.5f) * scale;
        if (sink) v[x] += sink[half * (N / 2) + 4 * i + x];
      }
      *(uint2*)(dst + half * (N / 2) + 4 * i) = make_uint2(pack_act(v[0], v[1]), pack_act(v[2], v[3]));
    }
  }
}

extern "C" __global__ void __launch_bounds__(128) dequantise(const __grid_constant__ Args a) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.y, seq = blockIdx.z;
  wait_predecessor();
  release_successor();
  const int end = min(a.end, a.lengths[seq]), t0 = a.begin + blockIdx.x * 16;
  if (t0 >= end) return;
  const u8* page = a.cache + a.table[(i64)seq * a.table_stride + t0 / PS] * a.page_stride + head * a.head_stride;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int t = t0 + warp * 4 + i, in_page = t % PS;
    if (t >= end) return;
    const u16* scales = (const u16*)(page + PS * (D / 2 + DV / 2)) + in_page;
    const i64 row = ((i64)a.start[seq] + t - a.begin) * a.kv_heads + head;
    const bool sunk = t == 0 && a.sink_key != nullptr;
    expand<D>(page + in_page * (D / 2), half_lo(scales[0]), sunk ? a.sink_key + head * D : nullptr, a.key + row * D, lane);
    expand<DV>(page + PS * (D / 2) + in_page * (DV / 2), half_lo(scales[PS]), sunk ? a.sink_value + head * DV : nullptr, a.value + row * DV, lane);
  }
}
