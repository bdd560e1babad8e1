// Quantise and store: k' = k Wk + bias and v' = v R + bias, scale search, 4-bit codes, into the pages; one launch.
//
// Compile-time: D, DV, PS (block size), SINK (position 0 has its own bias), METRIC_KEYS (round keys in the metric of the queries),
// TABLES_SHARED (its factor fits in shared memory), KEY_CLIP, VALUE_CLIP (the middle clip, in thousandths), OUTER_K,
// OUTER_V (of the matrices, see project.h), ACT_BF16.
// grid.x: blocks of keys, then as many of values; grid.y: KV heads.  A warp takes 16 tokens; lane (g, q) holds elements 8 j + 2 q, + 1
// of rows g and g + 8, so that elements e and e + D/2 of a byte meet in one lane.
// Rows are scaled to [-1, 1] in fp16.  Two fused multiply-adds (one saturating) leave a code in the low byte of each half;
// sums over bytes (dp4a) of x c and of c (15 - c) give the squared error of each of three clips and the least-squares refit.
// So a code may differ from the codec's where its element lies within 1% of a step of the middle between two codes.
#include "project.h"

struct Args {
  const u16* key; const u16* value; i64 key_stride, value_stride;  // [T, HK, D], [T, HK, DV], elements a token
  const i64* slots; const i64* positions;                          // [T]; positions may be null without SINK
  u8* cache; i64 page_stride, head_stride;                         // bytes
  const uint4* wk; const uint4* wv;                                // packed [HK, ..], and one matrix for all heads
  const float* key_bias; const float* value_bias;                  // of all positions, packed, and [HK, ..] more of position 0
  const uint2* factor; const u32* weight;                          // METRIC_KEYS: packed by pack.py
  int tokens, kv_heads, block_tokens;                              // tokens a block takes at once: 16 a warp, up to 128
};

DEV float quad_sum(float v) { v += __shfl_xor_sync(FULL, v, 1); return v + __shfl_xor_sync(FULL, v, 2); }

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

// Rows g and g + 8, scaled by gain / (largest absolute value), in fp16; x[j][2h], x[j][2h + 1] are this lane's of row h.
template <int TILES> struct Rows {
  u32 y[2][TILES];
  float peak[2];

  DEV void scale(const float (&x)[TILES][4], float gain) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float p = 1e-8f, odd = 0.f;  // two chains
#pragma unroll
      for (int j = 0; j < TILES; j++) { p = fmaxf(p, fabsf(x[j][2 * h])); odd = fmaxf(odd, fabsf(x[j][2 * h + 1])); }
      p = fmaxf(p, odd);
      p = fmaxf(p, __shfl_xor_sync(FULL, p, 1)); peak[h] = p = fmaxf(p, __shfl_xor_sync(FULL, p, 2));
      const float norm = __fdividef(gain, p);
#pragma unroll
      for (int j = 0; j < TILES; j++) y[h][j] = pack_half(x[j][2 * h] * norm, x[j][2 * h + 1] * norm);
    }
  }
};

// Plain rounding of a row y in [-1, 1] with the best of three clips.  Word j of `codes` holds those of tiles j and
// j + TILES / 2; the return value is the scale over the peak, fitted by least squares.
template <int TILES> DEV float round_plain(u32* codes, const u32 (&y)[TILES], float middle, u32 one) {
  const u32 ones = constant<0x01010101u>(), half = constant<0x38003800u>(), fifteen = constant<0x4B804B80u>(), magic = constant<0x64006400u>();
  u32 gain[3], w[3][TILES / 2];
  float clip[3];
  int total = 0, d4[3] = {0, 0, 0}, n4[3] = {0, 0, 0};
#pragma unroll
  for (int i = 0; i < 3; i++) {
    clip[i] = middle + 0.08f * (1 - i);
    gain[i] = pack_half(0.5f / clip[i], 0.5f / clip[i]);
  }
#pragma unroll
  for (int j = 0; j < TILES / 2; j++) {  // 127 y as signed bytes: 0x6600 is 1536, with unit steps
    const u32 y8 = __byte_perm(fma_half2(y[j], 0x57F057F0u, 0x66006600u), fma_half2(y[j + TILES / 2], 0x57F057F0u, 0x66006600u), 0x6420);
    total = dot4(y8, ones, total);
#pragma unroll
    for (int i = 0; i < 3; i++) {
      w[i][j] = four_codes(y[j], y[j + TILES / 2], gain[i], half, fifteen, magic);
      d4[i] = dot4(y8, w[i][j], d4[i]); n4[i] = dot4(w[i][j], mad(w[i][j], 0u - one, 0x0F0F0F0Fu), n4[i]);
    }
  }
  float d[3], n[3], error[3];  // sums of 127 y (code - 7.5) and of (code - 7.5)^2 over this lane
#pragma unroll
  for (int i = 0; i < 3; i++) {
    const float step = clip[i] * (1.f / 7.5f);
    d[i] = (float)d4[i] - 7.5f * (float)total; n[i] = 56.25f * (2 * TILES) - (float)n4[i];
    error[i] = quad_sum(step * (step * n[i] - (2.f / 127.f) * d[i]));
  }
  const bool second = error[1] < error[0], third = error[2] < fminf(error[0], error[1]);
#pragma unroll
  for (int j = 0; j < TILES / 2; j++) codes[j] = third ? w[2][j] : second ? w[1][j] : w[0][j];
  const float dot = quad_sum(third ? d[2] : second ? d[1] : d[0]), den = quad_sum(third ? n[2] : second ? n[1] : n[0]);
  return fmaxf(__fdividef(dot, 127.f * den), 0.f);
}

// Tables of the rounding in the metric in shared memory, bytes: the factor (if it fits) and weights
template <int TILES> struct Tables {
  static constexpr int FACTOR = TABLES_SHARED ? TILES * TILES / 2 * 256 : 0, WEIGHT = TILES * 32;
};

// Rounding of 16 rows, in steps, in the metric of the queries (codec.py): from the last tile of 8 elements to the first, the
// error e of a tile is carried into the tiles before it, f_i = sum_{k > i} F_ik e_k, on the matrix unit; within a tile elements
// do not wait for each other.  In half2, both rows at once.  Word j of `bytes`: bytes 8 j + 2 q, + 1, of row g in the low half,
// of row g + 8 in the high half.  With z = F c, c = code - 7.5, and r = e + f the fitted scale is 1 + <r, z> / <z, z> steps.
template <int TILES> DEV void round_in_metric(u32 (&bytes)[TILES / 2], float (&fitted)[2], const Rows<TILES>& row, const uint2* factor, u32 tables, int lane) {
  const u32 weight = tables + Tables<TILES>::FACTOR + 8 * (lane & 3);
  tables += 8 * lane; factor += lane;
  const u32 fifteenth = constant<0x2C442C44u>(), half = constant<0x38003800u>(), fifteen = constant<0x4B804B80u>(), magic = constant<0x64006400u>();
  auto entry = [&](int tile, int k) {
    const int at = (tile * (TILES / 2) + k) * 32;
    return TABLES_SHARED ? lds64(tables + 8 * at) : ldg64(factor + at);
  };
  u32 dot = 0, den = 0, e[TILES / 2][4];
#pragma unroll
  for (int b = TILES / 2 - 1; b >= 0; b--) {  // two tiles
    float a[2][4], f[2][4];                   // F x without x itself, and f
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int v = 0; v < 4; v++) a[i][v] = f[i][v] = 0.f;
    e[b][0] = e[b][1] = 0;
#pragma unroll
    for (int k = TILES / 2 - 1; k > b; k--)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint2 w = entry(2 * b + i, k);
        mma_f16(a[i], row.y[0][2 * k], row.y[1][2 * k], row.y[0][2 * k + 1], row.y[1][2 * k + 1], w.x, w.y, a[i]);
        mma_f16(f[i], e[k][0], e[k][1], e[k][2], e[k][3], w.x, w.y, f[i]);
      }
#pragma unroll
    for (int i = 1; i >= 0; i--) {
      const int tile = 2 * b + i;
      if (i == 0) {  // what the other tile, which came last, adds; the factor has zeros for this one's own part
        const uint2 w = entry(tile, b);
        mma_f16(a[0], row.y[0][tile], row.y[1][tile], row.y[0][tile + 1], row.y[1][tile + 1], w.x, w.y, a[0]);
        mma_f16(f[0], e[b][0], e[b][1], e[b][2], e[b][3], w.x, w.y, f[0]);
      }
      const uint2 own = lds64(weight + 32 * tile);
      u32 code[2], last[2];  // 1024 + code, e
#pragma unroll
      for (int v = 0; v < 2; v++) {
        const u32 x = __byte_perm(row.y[0][tile], row.y[1][tile], v ? 0x7632 : 0x5410), sum = pack_half(f[i][v], f[i][2 + v]);
        code[v] = fma_half2(fma_sat_half2(add_half2(x, sum), fifteenth, half), fifteen, magic);
        last[v] = sub_half2(add_half2(x, 0x47804780u), add_half2(code[v], 0xE400E400u));
        const u32 r = add_half2(last[v], sum), z = sub_half2(add_half2(x, pack_half(a[i][v], a[i][2 + v])), r), weighted = mul_half2(v ? own.y : own.x, z);
        dot = fma_half2(weighted, r, dot); den = fma_half2(weighted, z, den);
      }
#pragma unroll
      for (int h = 0; h < 2; h++) e[b][2 * i + h] = __byte_perm(last[0], last[1], h ? 0x7632 : 0x5410);
      const u32 pair = __byte_perm(code[0], code[1], 0x6240);
      if (tile >= TILES / 2) bytes[tile - TILES / 2] = pair << 4;
      else bytes[tile] |= pair;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float up = quad_sum(h ? half_hi(dot) : half_lo(dot)), down = quad_sum(h ? half_hi(den) : half_lo(den));
    fitted[h] = fmaxf(1.f + __fdividef(up, down), 0.f);
  }
}

// Blocks number `block` of `blocks` of one head's keys or values.
template <int DIM, bool METRIC, int OUTER> DEV void store_rows(const Args& a, const u16* src, i64 stride, const uint4* matrix_src, const float* bias, int block, int blocks,
                                       int code_offset, int scale_offset, float clip, u32 matrix) {
  constexpr int CHUNKS = (DIM + 31) / 32, TILES = DIM / 8, WORDS = (TILES / 2 + 1) / 2;
  constexpr bool AHEAD = !METRIC && DIM <= 128;  // the next rows wait in registers
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q4 = lane & 3, head = blockIdx.y;
  constexpr int MATRIX = TILES * (CHUNKS / OUTER) * 512;
  load_matrix<MATRIX, 256>(matrix, matrix_src);
  const u32 biases = matrix + MATRIX, tables = biases + DIM * 8;
  load_matrix<DIM * 8, 256>(biases, bias + head * DIM * 2);
  if constexpr (METRIC) {
    using Bytes = Tables<TILES>;
    if (TABLES_SHARED) load_matrix<Bytes::FACTOR, 256>(tables, a.factor + (i64)head * TILES * TILES / 2 * 32);
    load_matrix<Bytes::WEIGHT, 256>(tables + Bytes::FACTOR, a.weight + head * DIM);
  }
  wait_predecessor();
  release_successor();
  const int mine = warp * 16 < a.block_tokens ? warp * 16 : a.tokens;  // other warps only help to load the matrix
  const int ahead = blocks * a.block_tokens;
  int t0 = block * a.block_tokens + mine;
  auto row_of = [&](int t) { return t < a.tokens ? src + t * stride + head * DIM : nullptr; };
  const u32 one = 1 + ((u32)a.tokens >> 31);  // as far as the compiler knows, any number
  uint4 raw[CHUNKS][2];
  fetch_rows<CHUNKS, DIM>(raw, row_of(t0 + g), row_of(t0 + g + 8), q4);
  copy_wait<0>();
  __syncthreads();
  for (; t0 < a.tokens; t0 += ahead) {
    u32 rows[CHUNKS][8];
    const int ta = t0 + g, tb = t0 + g + 8;
    const i64 slot[2] = {ta < a.tokens ? a.slots[ta] : -1, tb < a.tokens ? a.slots[tb] : -1};
    const bool first[2] = {SINK && ta < a.tokens && a.positions[ta] == 0, SINK && tb < a.tokens && a.positions[tb] == 0};
    interleave(rows, raw, one);
    float x[TILES][4];
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      const uint4 b = lds128(biases + 64 * j + 16 * q4);
      x[j][0] = __uint_as_float(b.x); x[j][1] = __uint_as_float(b.y); x[j][2] = __uint_as_float(b.z); x[j][3] = __uint_as_float(b.w);
    }
    multiply<CHUNKS, TILES, OUTER>(x, rows, matrix, lane);
    if (SINK && __any_sync(FULL, first[0] || first[1])) {
      const float* more = bias + (2 * a.kv_heads + head) * DIM + 2 * q4;
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (first[h])
#pragma unroll
          for (int j = 0; j < TILES; j++) { x[j][2 * h] += more[8 * j]; x[j][2 * h + 1] += more[8 * j + 1]; }
    }
    if (AHEAD) fetch_rows<CHUNKS, DIM>(raw, row_of(ta + ahead), row_of(tb + ahead), q4);
    Rows<TILES> row;
    u32 words[2][WORDS];  // bytes 8 j + 2 q, + 1 of row h, for j = 2 m in the low half of word m and 2 m + 1 in the high half
    float scale[2];
    row.scale(x, METRIC ? 7.5f / clip : 1.f);
    if constexpr (METRIC) {
      u32 bytes[TILES / 2];
      round_in_metric<TILES>(bytes, scale, row, a.factor + (i64)head * TILES * (TILES / 2) * 32, tables, lane);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        scale[h] *= clip * (1.f / 7.5f) * row.peak[h];
#pragma unroll
        for (int m = 0; m < WORDS; m++) words[h][m] = __byte_perm(bytes[2 * m], bytes[min(2 * m + 1, TILES / 2 - 1)], h ? 0x7632 : 0x5410);
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        u32 codes[2 * WORDS];
        scale[h] = round_plain<TILES>(codes, row.y[h], clip, one) * row.peak[h];
#pragma unroll
        for (int m = 0; m < WORDS; m++) words[h][m] = __byte_perm(codes[2 * m], codes[2 * m + 1], 0x7632) * 16 + __byte_perm(codes[2 * m], codes[2 * m + 1], 0x5410);
      }
    }
    // Four pairs of bytes change places in the lanes of a row, so that a lane writes 8 bytes and a row whole sectors; the
    // pairs that are left over (head sizes of 80 and 96) are written as they are.
    uint2 quads[2][TILES / 8];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int j = 0; j < TILES / 8; j++) quads[h][j] = quad_transpose(words[h][2 * j], words[h][2 * j + 1], q4);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (slot[h] < 0) continue;
      const int in_page = slot[h] % PS;
      u8* page = a.cache + slot[h] / PS * a.page_stride + head * a.head_stride;
      u8* out = page + code_offset + in_page * (DIM / 2);
#pragma unroll
      for (int j = 0; j < TILES / 8; j++) *(uint2*)(out + 32 * j + 8 * q4) = quads[h][j];
#pragma unroll
      for (int j = TILES / 8 * 4; j < TILES / 2; j++) *((u16*)(out + 8 * j) + q4) = (u16)(words[h][j / 2] >> (16 * (j % 2)));
      if (q4 == 0) *(u16*)(page + scale_offset + in_page * 2) = (u16)pack_half(scale[h], 0.f);
    }
    if (!AHEAD) fetch_rows<CHUNKS, DIM>(raw, row_of(ta + ahead), row_of(tb + ahead), q4);
  }
}

extern "C" __global__ void __launch_bounds__(256, D <= 128 && DV <= 128 ? 2 : 1) store(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  const u32 matrix = smem_addr(smem);
  const int block = blockIdx.x, keys = gridDim.x / 2;
  if (block < keys)
    store_rows<D, METRIC_KEYS, OUTER_K>(a, a.key, a.key_stride, a.wk + (i64)blockIdx.y * (D / 8) * ((D + 31) / 32 / OUTER_K) * 32, a.key_bias, block, keys, 0, PS * (D / 2 + DV / 2), KEY_CLIP * 1e-3f, matrix);
  else
    store_rows<DV, false, OUTER_V>(a, a.value, a.value_stride, a.wv, a.value_bias, block - keys, gridDim.x - keys, PS * (D / 2), PS * (D / 2 + DV / 2 + 2), VALUE_CLIP * 1e-3f, matrix);
}
