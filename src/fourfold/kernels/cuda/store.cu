// Quantise and store: k' = k Wk + bias and v' = v R + bias, scale search, 4-bit codes, into the pages; one launch.
//
// Compile-time: D, DV, PS (block size), SINK (position 0 has its own bias), METRIC_KEYS (round keys in the metric of the queries),
// TABLES_SHARED (its factor fits in shared memory), ACT_BF16.
// grid.y: KV heads of keys, then of values.  A warp takes 16 tokens; lane (g, q) holds elements 8 j + 2 q, + 1 of rows
// g and g + 8, so that elements e and e + D/2 of a byte meet in one lane.
// Rows are scaled to [-1, 1] in fp16.  Two fused multiply-adds (one saturating) leave a code in the low byte of each half;
// sums over bytes (dp4a) of x c and of c (15 - c) give the squared error of each of six clips and the least-squares refit.
// So a code may differ from the codec's where its element lies within 1% of a step of the middle between two codes.
#include "project.h"

struct Args {
  const u16* key; const u16* value; i64 key_stride, value_stride;  // [T, HK, D], [T, HK, DV], elements a token
  const i64* slots; const i64* positions;                          // [T]; positions may be null without SINK
  u8* cache; i64 page_stride, head_stride;                         // bytes
  const uint4* wk; const uint4* wv;                                // packed [HK, ..], and one matrix for all heads
  const float* key_bias; const float* value_bias;                  // [2, HK, D], [2, HK, DV]: all positions; position 0
  const uint2* factor; const float4* corner; const float* weight;   // METRIC_KEYS: packed by pack.py
  int tokens, kv_heads, block_tokens;                              // tokens a block takes at once: 16 a warp, up to 128
};

DEV u32 fma_half2(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
DEV u32 fma_sat_half2(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.sat.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
DEV int dot4(u32 a, u32 b, int c) { int r; asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
DEV float quad_sum(float v) { v += __shfl_xor_sync(FULL, v, 1); return v + __shfl_xor_sync(FULL, v, 2); }

// a constant that stays in a register: a half2 instruction takes one immediate only
template <u32 V> DEV u32 constant() { u32 r; asm volatile("mov.b32 %0, %1;" : "=r"(r) : "n"(V)); return r; }

DEV float kept(float v) { asm volatile("" : "+f"(v)); return v; }

// Lane q of four holds 16-bit numbers j = 0, 1 in `a` and 2, 3 in `b`; returns number q of all four lanes in their order.
DEV uint2 quad_transpose(u32 a, u32 b, int q) {
  const u32 far = __shfl_xor_sync(FULL, q & 2 ? a : b, 2), near = q & 2 ? b : a;  // numbers 2 (q / 2), + 1 of this lane and of lane q ^ 2
  const u32 low = q & 2 ? far : near, high = q & 2 ? near : far;                 // the lower lane's first
  const u32 even = __byte_perm(low, high, 0x5410), odd = __byte_perm(low, high, 0x7632);
  const u32 other = __shfl_xor_sync(FULL, q & 1 ? even : odd, 1), own = q & 1 ? odd : even;
  const u32 first = q & 1 ? other : own, second = q & 1 ? own : other;           // of lanes 0 or 1 (and 2 or 3)
  return make_uint2(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
}

// codes of two pairs of elements in [-1, 1], one a byte: saturate((code + 1/2) / 15), then 1024 + code
DEV u32 four_codes(u32 y0, u32 y1, u32 gain, u32 half, u32 fifteen, u32 magic) {
  return __byte_perm(fma_half2(fma_sat_half2(y0, gain, half), fifteen, magic), fma_half2(fma_sat_half2(y1, gain, half), fifteen, magic), 0x6420);
}

// A row of which this lane holds x[j][2h], x[j][2h + 1], scaled to [-1, 1].
template <int TILES> struct Row {
  u32 y[TILES];                    // in fp16
  float peak, clip;                // largest absolute value; the best clip
  float dot, den;                  // with that clip: sum of 127 y (code - 7.5) and of (code - 7.5)^2 over this lane

  DEV void scale(const float (&x)[TILES][4], int h) {
    peak = 1e-8f;
#pragma unroll
    for (int j = 0; j < TILES; j++) peak = fmaxf(peak, fmaxf(fabsf(x[j][2 * h]), fabsf(x[j][2 * h + 1])));
    peak = fmaxf(peak, __shfl_xor_sync(FULL, peak, 1)); peak = fmaxf(peak, __shfl_xor_sync(FULL, peak, 2));
    const float norm = __fdividef(1.f, peak);
#pragma unroll
    for (int j = 0; j < TILES; j++) y[j] = pack_half(x[j][2 * h] * norm, x[j][2 * h + 1] * norm);
  }
  // code words j hold the codes of tiles j and j + TILES / 2
  DEV void round(u32 (&codes)[TILES / 2]) const {
    const u32 half = constant<0x38003800u>(), fifteen = constant<0x4B804B80u>(), magic = constant<0x64006400u>();
    const float inverse = __fdividef(0.5f, clip);
    const u32 gain = pack_half(inverse, inverse);
#pragma unroll
    for (int j = 0; j < TILES / 2; j++) codes[j] = four_codes(y[j], y[j + TILES / 2], gain, half, fifteen, magic);
  }
};

// The best of six clips for two rows at once: two independent chains hide each other's latencies.
template <int TILES> DEV void search(Row<TILES> (&row)[2]) {
  const u32 ones = constant<0x01010101u>();
  u32 y8[2][TILES / 2];
  int total[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < TILES / 2; j++)  // 127 y as signed bytes: 0x6600 is 1536, with unit steps
#pragma unroll
    for (int h = 0; h < 2; h++) {
      y8[h][j] = __byte_perm(fma_half2(row[h].y[j], 0x57F057F0u, 0x66006600u), fma_half2(row[h].y[j + TILES / 2], 0x57F057F0u, 0x66006600u), 0x6420);
      total[h] = dot4(y8[h][j], ones, total[h]);
    }
  float best[2] = {3e38f, 3e38f};
  const u32 half = constant<0x38003800u>(), fifteen = constant<0x4B804B80u>(), magic = constant<0x64006400u>();
#pragma unroll 1
  for (float c = 1.f; c > 0.55f; c -= 0.08f) {
    const float inverse = __fdividef(0.5f, c), step = c * (1.f / 7.5f);
    const u32 gain = pack_half(inverse, inverse);
    int d4[2] = {0, 0}, n4[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < TILES / 2; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32 w = four_codes(row[h].y[j], row[h].y[j + TILES / 2], gain, half, fifteen, magic);
        d4[h] = dot4(y8[h][j], w, d4[h]); n4[h] = dot4(w, w ^ 0x0F0F0F0Fu, n4[h]);
      }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float d = (float)d4[h] - 7.5f * (float)total[h], n = 56.25f * (2 * TILES) - (float)n4[h];
      const float error = quad_sum(step * (step * n - (2.f / 127.f) * d));
      if (error < best[h]) { best[h] = error; row[h].clip = c; row[h].dot = d; row[h].den = n; }
    }
  }
}

DEV float2 lds_float2(u32 a) { float2 v; asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a)); return v; }
DEV float4 lds_float4(u32 a) { float4 v; asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a)); return v; }

// Tables of the sequential rounding in shared memory, bytes: the factor (if it fits), corners, weights
template <int TILES> struct Tables {
  static constexpr int FACTOR = TABLES_SHARED ? TILES * TILES / 2 * 256 : 0, CORNER = TILES / 2 * 1024, WEIGHT = TILES * 32;
};

// Sequential rounding of 16 rows in the metric of the queries (codec.py): from the last element to the first, the error e
// (in steps) of each element is carried into the elements before it, f_i = sum_{k > i} U_ik e_k with U unit upper
// triangular.  Sums over later blocks of 16 run on the matrix unit; inside a block the four lanes of a row take turns.
// With a = U x and c = a - (e + f), in steps, the fitted scale is <a, c> / <c, c>, weighted by the squared diagonal.
template <int TILES> DEV void round_in_metric(u32 (&codes)[TILES], float (&fitted)[2], const Row<TILES> (&row)[2], const uint2* factor, u32 tables, int lane) {
  const u32 corner = tables + Tables<TILES>::FACTOR + 16 * (lane & 3), weight = tables + Tables<TILES>::FACTOR + Tables<TILES>::CORNER + 8 * (lane & 3);
  tables += 8 * lane; factor += lane;
  const float step[2] = {__fdividef(7.5f, row[0].clip), __fdividef(7.5f, row[1].clip)};  // 1 / step of the scaled row
  const float fifteenth = kept(1.f / 15.f), fifteen = kept(15.f), magic = kept(8388608.f);
  float dot[2] = {0.f, 0.f}, den[2] = {0.f, 0.f};
  u32 e[TILES / 2][4];
#pragma unroll
  for (int b = TILES / 2 - 1; b >= 0; b--) {
    float a[2][4], f[2][4], x[2][4], last[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      a[i][0] = a[i][1] = a[i][2] = a[i][3] = f[i][0] = f[i][1] = f[i][2] = f[i][3] = 0.f;
      uint2 w[TILES / 2];
#pragma unroll
      for (int k = b; k < TILES / 2; k++) {
        const int at = ((2 * b + i) * (TILES / 2) + k) * 32;
        if (TABLES_SHARED) asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(w[k].x), "=r"(w[k].y) : "r"(tables + 8 * at));
        else w[k] = __ldg(factor + at);
      }
#pragma unroll
      for (int k = b; k < TILES / 2; k++) {
        mma_f16(a[i], row[0].y[2 * k], row[1].y[2 * k], row[0].y[2 * k + 1], row[1].y[2 * k + 1], w[k].x, w[k].y, a[i]);
        if (k > b) mma_f16(f[i], e[k][0], e[k][1], e[k][2], e[k][3], w[k].x, w[k].y, f[i]);
      }
#pragma unroll
      for (int h = 0; h < 2; h++) { x[i][2 * h] = half_lo(row[h].y[2 * b + i]) * step[h]; x[i][2 * h + 1] = half_hi(row[h].y[2 * b + i]) * step[h]; }
    }
    float middle[2][4], shifted[2][4];  // x / 15 + 1/2 and x + 7.5
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int v = 0; v < 4; v++) { middle[i][v] = fmaf(x[i][v], fifteenth, 0.5f); shifted[i][v] = x[i][v] + 7.5f; }
    float4 next = lds_float4(corner + (b * 16 + 15) * 64);
#pragma unroll
    for (int k = 15; k >= 0; k--) {
      const int i = k >> 3, owner = (k & 7) >> 1, v = k & 1;
      const float4 u = next;
      if (k) next = lds_float4(corner + (b * 16 + k - 1) * 64);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        // every lane rounds its own element v; the value is final once its turn has come, and stays the same after
        const float t = fmaf(__saturatef(fmaf(f[i][2 * h + v], fifteenth, middle[i][2 * h + v])), fifteen, magic) - magic;
        last[i][2 * h + v] = shifted[i][2 * h + v] - t;
        const float error = __shfl_sync(FULL, last[i][2 * h + v], (lane & ~3) | owner);
        f[0][2 * h] = fmaf(error, u.x, f[0][2 * h]); f[0][2 * h + 1] = fmaf(error, u.y, f[0][2 * h + 1]);
        f[1][2 * h] = fmaf(error, u.z, f[1][2 * h]); f[1][2 * h + 1] = fmaf(error, u.w, f[1][2 * h + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float2 w = lds_float2(weight + 32 * (2 * b + i));
#pragma unroll
      for (int h = 0; h < 2; h++) {
        e[b][2 * i + h] = pack_half(last[i][2 * h], last[i][2 * h + 1]);
        const float a0 = a[i][2 * h] * step[h], a1 = a[i][2 * h + 1] * step[h];
        const float c0 = a0 - last[i][2 * h] - f[i][2 * h], c1 = a1 - last[i][2 * h + 1] - f[i][2 * h + 1];
        dot[h] += w.x * a0 * c0 + w.y * a1 * c1; den[h] += w.x * c0 * c0 + w.y * c1 * c1;
        const float z0 = (shifted[i][2 * h] - last[i][2 * h]) + magic, z1 = (shifted[i][2 * h + 1] - last[i][2 * h + 1]) + magic;
        const u32 pair = __byte_perm(__float_as_uint(z0), __float_as_uint(z1), 0x3340) & 0x0F0Fu;
        codes[2 * b + i] = h ? codes[2 * b + i] | pair << 16 : pair;
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++) fitted[h] = fmaxf(__fdividef(quad_sum(dot[h]), quad_sum(den[h])), 0.f) * row[h].peak * __fdividef(1.f, step[h]);
}

template <int DIM, bool METRIC> DEV void store_rows(const Args& a, const u16* src, i64 stride, const uint4* matrix_src, const float* bias, int head,
                                       int code_offset, int scale_offset, u32 matrix) {
  constexpr int CHUNKS = (DIM + 31) / 32, TILES = DIM / 8;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q4 = lane & 3;
  load_matrix<TILES * CHUNKS * 512, 256>(matrix, matrix_src);
  const u32 tables = matrix + TILES * CHUNKS * 512;
  if constexpr (METRIC) {
    using Bytes = Tables<TILES>;
    if (TABLES_SHARED) load_matrix<Bytes::FACTOR, 256>(tables, a.factor + (i64)head * TILES * TILES / 2 * 32);
    load_matrix<Bytes::CORNER, 256>(tables + Bytes::FACTOR, a.corner + (i64)head * TILES / 2 * 64);
    load_matrix<Bytes::WEIGHT, 256>(tables + Bytes::FACTOR + Bytes::CORNER, a.weight + head * DIM);
  }
  wait_predecessor();
  release_successor();
  bool loaded = false;
  for (int block = blockIdx.x * a.block_tokens; block < a.tokens; block += gridDim.x * a.block_tokens) {
    const int t0 = warp * 16 < a.block_tokens ? block + warp * 16 : a.tokens;  // other warps only help to load the matrix
    u32 rows[CHUNKS][8];
    const int ta = t0 + g, tb = t0 + g + 8;
    const i64 slot[2] = {ta < a.tokens ? a.slots[ta] : -1, tb < a.tokens ? a.slots[tb] : -1};
    const bool first[2] = {SINK && ta < a.tokens && a.positions[ta] == 0, SINK && tb < a.tokens && a.positions[tb] == 0};
    load_rows<CHUNKS, DIM>(rows, ta < a.tokens ? src + ta * stride + head * DIM : nullptr, tb < a.tokens ? src + tb * stride + head * DIM : nullptr, q4, (u32)a.tokens >> 31);
    {  // the next block's rows into L2: row lane / 2 of 16, one 128-byte line of two
      const int t = t0 + (int)gridDim.x * a.block_tokens + lane / 2;
      if (t < a.tokens)
        for (int e = lane % 2 * 64; e < DIM; e += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(src + t * stride + head * DIM + e));
    }
    if (!loaded) { copy_wait<0>(); __syncthreads(); loaded = true; }
    if (t0 >= a.tokens) continue;
    float x[TILES][4];
    const float* row_bias[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      row_bias[h] = bias + ((first[h] ? a.kv_heads : 0) + head) * DIM + 2 * q4;
    }
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      const float2 b0 = *(const float2*)(row_bias[0] + 8 * j), b1 = *(const float2*)(row_bias[1] + 8 * j);
      x[j][0] = b0.x; x[j][1] = b0.y; x[j][2] = b1.x; x[j][3] = b1.y;
    }
#pragma unroll
    for (int j = 0; j < TILES; j += 2) multiply<CHUNKS, 2>(x + j, rows, matrix, j, lane);
    Row<TILES> row[2];
    u32 codes[TILES];  // of row g in the low half, of row g + 8 in the high half, one a byte
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; h++) row[h].scale(x, h);
    search<TILES>(row);
    if constexpr (METRIC) {
      constexpr int BLOCKS = TILES / 2;
      round_in_metric<TILES>(codes, scale, row, a.factor + (i64)head * TILES * BLOCKS * 32, tables, lane);
    } else {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        u32 w[TILES / 2];
        row[h].round(w);
        scale[h] = fmaxf(quad_sum(row[h].dot) * row[h].peak / (127.f * quad_sum(row[h].den)), 0.f);
#pragma unroll
        for (int j = 0; j < TILES / 2; j++) {
          codes[j] = h ? __byte_perm(codes[j], w[j], 0x5410) : w[j];
          codes[j + TILES / 2] = h ? __byte_perm(codes[j + TILES / 2], w[j], 0x7610) : w[j] >> 16;
        }
      }
    }
    // Bytes 8 j + 2 q, + 1 of both rows are here.  Four of those pairs change places in the lanes of a row, so that a lane
    // writes 8 bytes and a row whole sectors; the pairs that are left over (head sizes of 80 and 96) are written as they are.
    u32 bytes[TILES / 2];  // of row g in the low half, of row g + 8 in the high half
#pragma unroll
    for (int j = 0; j < TILES / 2; j++) bytes[j] = codes[j] | codes[j + TILES / 2] << 4;
    uint2 quads[2][TILES / 8];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int j = 0; j < TILES / 8; j++) {
        const u32* from = bytes + 4 * j;
        quads[h][j] = quad_transpose(__byte_perm(from[0], from[1], h ? 0x7632 : 0x5410), __byte_perm(from[2], from[3], h ? 0x7632 : 0x5410), q4);
      }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (slot[h] < 0) continue;
      const int in_page = slot[h] % PS;
      u8* page = a.cache + slot[h] / PS * a.page_stride + head * a.head_stride;
      u8* out = page + code_offset + in_page * (DIM / 2);
#pragma unroll
      for (int j = 0; j < TILES / 8; j++) *(uint2*)(out + 32 * j + 8 * q4) = quads[h][j];
#pragma unroll
      for (int j = TILES / 8 * 4; j < TILES / 2; j++) *((u16*)(out + 8 * j) + q4) = (u16)(bytes[j] >> (16 * h));
      if (q4 == 0) *(u16*)(page + scale_offset + in_page * 2) = (u16)pack_half(scale[h], 0.f);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, D <= 128 && DV <= 128 ? 2 : 1) store(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  const u32 matrix = smem_addr(smem);
  const int head = blockIdx.y % a.kv_heads;
  if (blockIdx.y < a.kv_heads)
    store_rows<D, METRIC_KEYS>(a, a.key, a.key_stride, a.wk + (i64)head * (D / 8) * ((D + 31) / 32) * 32, a.key_bias, head, 0, PS * (D / 2 + DV / 2), matrix);
  else
    store_rows<DV, false>(a, a.value, a.value_stride, a.wv, a.value_bias, head, PS * (D / 2), PS * (D / 2 + DV / 2 + 2), matrix);
}
