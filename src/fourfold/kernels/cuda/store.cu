// Quantise and store: k' = k Wk - bias and v' = v R - bias, scale search, 4-bit codes, into the pages; one launch.
//
// Compile-time: D, DV, PS (block size), SINK (position 0 has its own bias), FEEDBACK, ACT_BF16.
// grid.y: KV heads of keys, then of values.  A warp takes 16 tokens; lane (g, q) holds elements 8 j + 2 q, + 1 of rows
// g and g + 8, so that elements e and e + D/2 of a byte meet in one lane.
// Search over six clips: rows are scaled to [-1, 1] in fp16; two fused multiply-adds (one saturating) leave the code in
// the low byte of each half; sums over bytes (dp4a) give sum x c and sum c (15 - c), from which the squared error follows.
// The winning scale's codes and the least-squares refit are computed again in fp32.
#include "project.h"

struct Args {
  const u16* key; const u16* value; i64 key_stride, value_stride;  // [T, HK, D], [T, HK, DV], elements a token
  const i64* slots; const i64* positions;                          // [T]; positions may be null without SINK
  u8* cache; i64 page_stride, head_stride;                         // bytes
  const uint4* wk; const uint4* wv;                                // packed [HK, ..], and one matrix for all heads
  const float* key_bias; const float* value_bias;                  // [2, HK, D], [2, HK, DV]: all positions; position 0
  const u16* feedback;                                             // packed by pack.py, or null
  int tokens, kv_heads;
};

DEV u32 fma_half2(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
DEV u32 fma_sat_half2(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.sat.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
DEV int dot4(u32 a, u32 b, int c) { int r; asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
DEV float quad_sum(float v) { v += __shfl_xor_sync(FULL, v, 1); return v + __shfl_xor_sync(FULL, v, 2); }

// fraction of the peak that the best of the six clips keeps, for a row spread over four lanes as x[j][2h], x[j][2h + 1]
template <int TILES> DEV float best_clip(const float (&x)[TILES][4], int h, float peak) {
  const float norm = 1.f / peak;
  u32 y[TILES], y8[TILES / 2];
#pragma unroll
  for (int j = 0; j < TILES; j++) y[j] = pack_half(x[j][2 * h] * norm, x[j][2 * h + 1] * norm);
  int total = 0;
#pragma unroll
  for (int j = 0; j < TILES / 2; j++) {  // 127 y as signed bytes: 0x6600 is 1536, with unit steps
    y8[j] = __byte_perm(fma_half2(y[2 * j], 0x57F057F0u, 0x66006600u), fma_half2(y[2 * j + 1], 0x57F057F0u, 0x66006600u), 0x6420);
    total = dot4(y8[j], 0x01010101u, total);
  }
  float best = 3e38f, clip = 1.f;
#pragma unroll
  for (int i = 0; i < 6; i++) {
    const float c = 1.f - 0.08f * i, step = c / 7.5f;
    const u32 gain = pack_half(0.5f / c, 0.5f / c);
    int dot = 0, den = 0;
#pragma unroll
    for (int j = 0; j < TILES / 2; j++) {  // saturate((code + 1/2) / 15), then 1024 + code
      const u32 t0 = fma_half2(fma_sat_half2(y[2 * j], gain, 0x38003800u), 0x4B804B80u, 0x64006400u);
      const u32 t1 = fma_half2(fma_sat_half2(y[2 * j + 1], gain, 0x38003800u), 0x4B804B80u, 0x64006400u);
      const u32 codes = __byte_perm(t0, t1, 0x6420);
      dot = dot4(y8[j], codes, dot);
      den = dot4(codes, codes ^ 0x0F0F0F0Fu, den);
    }
    const float error = quad_sum(-step * step * den - 2.f * step / 127.f * (dot - 7.5f * total)) + step * step * 56.25f * (8 * TILES);
    if (error < best) { best = error; clip = c; }
  }
  return clip;
}

template <int DIM> DEV void store_rows(const Args& a, const u16* src, i64 stride, const uint4* matrix_src, const float* bias, int head,
                                       int code_offset, int scale_offset, u32 matrix) {
  constexpr int CHUNKS = (DIM + 31) / 32, TILES = DIM / 8;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q4 = lane & 3;
  load_matrix<TILES * CHUNKS * 512, 256>(matrix, matrix_src);
  wait_predecessor();
  release_successor();
  bool loaded = false;
  for (int block = blockIdx.x * 128; block < a.tokens; block += gridDim.x * 128) {
    const int t0 = block + warp * 16;
    u32 rows[CHUNKS][8];
    const int ta = t0 + g, tb = t0 + g + 8;
    load_rows<CHUNKS, DIM>(rows, ta < a.tokens ? src + ta * stride + head * DIM : nullptr, tb < a.tokens ? src + tb * stride + head * DIM : nullptr, q4);
    if (!loaded) { copy_wait<0>(); __syncthreads(); loaded = true; }
    if (t0 >= a.tokens) continue;
    float x[TILES][4];
    const float* row_bias[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int t = t0 + g + 8 * h;
      const bool first = SINK && t < a.tokens && a.positions[t] == 0;
      row_bias[h] = bias + ((first ? a.kv_heads : 0) + head) * DIM + 2 * q4;
    }
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      x[j][0] = x[j][1] = x[j][2] = x[j][3] = 0.f;
      multiply<CHUNKS>(x[j], rows, matrix, j, lane);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float2 b = *(const float2*)(row_bias[h] + 8 * j);
        x[j][2 * h] -= b.x; x[j][2 * h + 1] -= b.y;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int t = t0 + g + 8 * h;
      float peak = 1e-8f;
#pragma unroll
      for (int j = 0; j < TILES; j++) peak = fmaxf(peak, fmaxf(fabsf(x[j][2 * h]), fabsf(x[j][2 * h + 1])));
      peak = fmaxf(peak, __shfl_xor_sync(FULL, peak, 1)); peak = fmaxf(peak, __shfl_xor_sync(FULL, peak, 2));
      const float inverse = 7.5f / (peak * best_clip<TILES>(x, h, peak));
      float dot = 0.f, den = 0.f;
      u32 code[TILES];  // two codes, in bits 0-3 and 8-11
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        const float c0 = fminf(fmaxf(fmaf(x[j][2 * h], inverse, 7.5f), 0.f), 15.f) + 8388608.f;
        const float c1 = fminf(fmaxf(fmaf(x[j][2 * h + 1], inverse, 7.5f), 0.f), 15.f) + 8388608.f;
        code[j] = __byte_perm(__float_as_uint(c0), __float_as_uint(c1), 0x3340) & 0x0F0Fu;
        const float e0 = (c0 - 8388608.f) - 7.5f, e1 = (c1 - 8388608.f) - 7.5f;
        dot = fmaf(x[j][2 * h], e0, fmaf(x[j][2 * h + 1], e1, dot)); den = fmaf(e0, e0, fmaf(e1, e1, den));
      }
      dot = quad_sum(dot); den = quad_sum(den);
      const i64 slot = t < a.tokens ? a.slots[t] : -1;
      if (slot < 0) continue;
      u8* page = a.cache + slot / PS * a.page_stride + head * a.head_stride;
      u16* out = (u16*)(page + code_offset + slot % PS * (DIM / 2)) + q4;
#pragma unroll
      for (int j = 0; j < TILES / 2; j++) out[4 * j] = (u16)(code[j] | code[j + TILES / 2] << 4);
      if (q4 == 0) *(u16*)(page + scale_offset + slot % PS * 2) = (u16)pack_half(fmaxf(dot / den, 0.f), 0.f);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, D <= 128 && DV <= 128 ? 2 : 1) store(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  const u32 matrix = smem_addr(smem);
  const int head = blockIdx.y % a.kv_heads;
  if (blockIdx.y < a.kv_heads)
    store_rows<D>(a, a.key, a.key_stride, a.wk + (i64)head * (D / 8) * ((D + 31) / 32) * 32, a.key_bias, head, 0, PS * (D / 2 + DV / 2), matrix);
  else
    store_rows<DV>(a, a.value, a.value_stride, a.wv, a.value_bias, head, PS * (D / 2), PS * (D / 2 + DV / 2 + 2), matrix);
}
