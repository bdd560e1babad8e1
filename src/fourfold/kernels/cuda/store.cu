// Quantise and store: k' = k Wk + bias and v' = v R + bias, scale search, 4-bit codes, into the pages; one launch.
//
// Compile-time: D, DV, PS (block size), SINK (position 0 has its own bias), METRIC_KEYS (round keys in the metric of the queries),
// TABLES_SHARED (its factor fits in shared memory), KEY_CLIP, VALUE_CLIP (the middle clip, in thousandths), CLIP_APART (of a
// plain clip from it), OUTER_K, OUTER_V (of the matrices, see project.h), ACT_BF16.
// grid.x: KV heads; grid.y: blocks of keys, then as many of values, so that a multiprocessor has both.
// A warp takes 16 tokens; lane (g, q) holds elements 8 j + 2 q, + 1 of rows g and g + 8, so that elements e and e + D/2 of a
// byte meet in one lane.
// Rows are rounded to fp16 after the products (the row's largest element is at least 7 steps, so that is 1 / 300 of a step).
// So a code may differ from the codec's where its element lies within 1% of a step of the middle between two codes.
// Elements beyond 16,000 may saturate; scales are finite whatever comes.
#include "project.h"

struct Args {
  const u16* key; const u16* value; i64 key_stride, value_stride;  // [T, HK, D], [T, HK, DV], elements a token
  const i64* slots; const i64* positions;                          // [T]; positions may be null without SINK
  u8* cache; i64 page_stride, head_stride;                         // bytes
  const uint4* wk; const uint4* wv;                                // packed [HK, ..], and one matrix for all heads
  const float* key_bias; const float* value_bias;                  // packed, of all positions, and another of position 0
  const uint4* factor;                                             // METRIC_KEYS: packed by pack.py
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

// ---- a row's largest element and its scale ---------------------------------------------------------------
// Rows are multiplied by norm[h] = gain / (largest absolute value), rounded to fp16.
template <int TILES> DEV void normalise(u32 (&y)[2][TILES], float (&norm)[2], float gain) {
  u32 peak[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    u32 even = 0, odd = 0;  // two chains
#pragma unroll
    for (int j = 0; j < TILES; j += 2) { even = max_half2(even, abs_half2(y[h][j])); odd = max_half2(odd, abs_half2(y[h][j + 1])); }
    peak[h] = max_half2(even, odd);
  }
  u32 p = max_half2(__byte_perm(peak[0], peak[1], 0x5410), __byte_perm(peak[0], peak[1], 0x7632));  // row g low, row g + 8 high
  p = max_half2(p, __shfl_xor_sync(FULL, p, 1));
  p = max_half2(p, __shfl_xor_sync(FULL, p, 2));
  // fp16 ends at 65504: neither the largest element nor what is divided by it may be infinite
  const float low = fminf(fmaxf(half_lo(p), 2e-5f), 65504.f), high = fminf(fmaxf(half_hi(p), 2e-5f), 65504.f);
  const u32 norms = pack_half(__fdividef(gain, low), __fdividef(gain, high));
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const u32 twice = __byte_perm(norms, norms, h ? 0x3232 : 0x1010);
    norm[h] = half_lo(twice);
#pragma unroll
    for (int j = 0; j < TILES; j++) y[h][j] = mul_half2(y[h][j], twice);
  }
}

// ---- plain rounding -----------------------------------------------------------------------------------
// codes of two pairs of elements in [-1, 1], one a byte: saturate((code + 1/2) / 15), then 1024 + code
DEV u32 four_codes(u32 y0, u32 y1, u32 gain, u32 half, u32 fifteen, u32 magic) {
  return __byte_perm(fma_half2(fma_sat_half2(y0, gain, half), fifteen, magic), fma_half2(fma_sat_half2(y1, gain, half), fifteen, magic), 0x6420);
}

// Rows in [-1, 1] with the better of two clips.  Sums over bytes (dp4a) of y c and of c (15 - c) give each clip's squared error
// and the scale that fits best.  Word j of `codes` holds those of tiles j and j + TILES / 2 of a row; returned is the
// scale, of row g in lanes q = 0, 1 and of row g + 8 in lanes 2, 3.
template <int TILES, int CLIP> DEV float round_plain(u32 (&codes)[2][TILES / 2], const u32 (&y)[2][TILES], u32 one, int q) {
  const u32 ones = constant<0x01010101u>(), half = constant<0x38003800u>(), fifteen = constant<0x4B804B80u>(), magic = constant<0x64006400u>();
  constexpr float clip[2] = {(CLIP + CLIP_APART) * 1e-3f, (CLIP - CLIP_APART) * 1e-3f};
  float d[2], n[2];  // of each row's better clip: sums of 127 y (code - 7.5) and of (code - 7.5)^2 over this lane
#pragma unroll
  for (int h = 0; h < 2; h++) {
    u32 w[2][TILES / 2];
    int total = 0, d4[2] = {0, 0}, n4[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < TILES / 2; j++) {  // 127 y as signed bytes: 0x6600 is 1536, with unit steps
      const u32 y0 = y[h][j], y1 = y[h][j + TILES / 2];
      const u32 y8 = __byte_perm(fma_half2(y0, 0x57F057F0u, 0x66006600u), fma_half2(y1, 0x57F057F0u, 0x66006600u), 0x6420);
      total = dot4(y8, ones, total);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        w[i][j] = four_codes(y0, y1, pack_half(0.5f / clip[i], 0.5f / clip[i]), half, fifteen, magic);
        d4[i] = dot4(y8, w[i][j], d4[i]); n4[i] = dot4(w[i][j], mad(w[i][j], 0u - one, 0x0F0F0F0Fu), n4[i]);
      }
    }
    float dot[2], den[2], error[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float step = clip[i] * (1.f / 7.5f);
      dot[i] = (float)d4[i] - 7.5f * (float)total; den[i] = 56.25f * (2 * TILES) - (float)n4[i];
      error[i] = step * (step * den[i] - (2.f / 127.f) * dot[i]);
    }
    const bool second = quad_sum(error[1] - error[0]) < 0.f;
#pragma unroll
    for (int j = 0; j < TILES / 2; j++) codes[h][j] = second ? w[1][j] : w[0][j];
    d[h] = second ? dot[1] : dot[0]; n[h] = second ? den[1] : den[0];
  }
  float dot = q & 2 ? d[1] : d[0], den = q & 2 ? n[1] : n[0];  // each pair of lanes sums one row
  dot += __shfl_xor_sync(FULL, q & 2 ? d[0] : d[1], 2); den += __shfl_xor_sync(FULL, q & 2 ? n[0] : n[1], 2);
  dot += __shfl_xor_sync(FULL, dot, 1); den += __shfl_xor_sync(FULL, den, 1);
  return fmaxf(__fdividef(dot, 127.f * den), 0.f);
}

// ---- rounding in the metric of the queries (codec.py) ----------------------------------------------------
// From the last tile of 8 elements to the first, the error e = x - z of a tile is carried into the tiles before it,
// f_i = sum_{k > i} F_ik e_k, on the matrix unit; within a tile elements do not wait for each other.  z = code - 7.5.
//
// Rows come in units of 512 to the step.  A code is then 15 times a saturated number in units of 2^-24, the smallest that
// fp16 has: rounding to the nearest multiple is the hardware's, and the bits are the code.
struct Metric {
  const uint4* factor;  // this head's, if it is not in shared memory
  u32 table;            // in shared memory, of this lane
  int lane;
  // of tiles 2 b and 2 b + 1, elements of block k
  template <int TILES> DEV uint4 entry(int b, int k) const {
    const int at = (b * (TILES / 2) + k) * 32;
    return TABLES_SHARED ? lds128(table + 16 * at) : ldg128(factor + at + lane);
  }
};

template <int TILES> DEV void round_in_metric(u32 (&bytes)[2][TILES / 2], const u32 (&x)[2][TILES], const Metric& m, u32 one) {
  constexpr u32 UNIT = 0x000F000F;  // 15 of 2^-24
  constexpr int PAIRS = TILES / 2;
  const u32 half = constant<0x38003800u>(), to_step = constant<0x50445044u>(), middle = constant<0xA380A380u>(), up = constant<0x78007800u>();
  u32 e[PAIRS][4];
#pragma unroll
  for (int b = PAIRS - 1; b >= 0; b--) {
    float f[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int v = 0; v < 4; v++) f[i][v] = 0.f;
#pragma unroll
    for (int k = PAIRS - 1; k > b; k--) {
      const uint4 w = m.entry<TILES>(b, k);
      mma_f16(f[0], e[k][0], e[k][1], e[k][2], e[k][3], w.x, w.y, f[0]);
      mma_f16(f[1], e[k][0], e[k][1], e[k][2], e[k][3], w.z, w.w, f[1]);
    }
#pragma unroll
    for (int i = 1; i >= 0; i--) {
      const int tile = 2 * b + i;
      if (i == 0) {  // what the other tile adds; in other registers (see `interleave`), or all operands are copied
        const uint4 w = m.entry<TILES>(b, b);
        mma_f16(f[0], 0, 0, e[b][2] * one, e[b][3] * one, w.x, w.y, f[0]);
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32 y = x[h][tile], t = add_half2(y, pack_half(f[i][2 * h], f[i][2 * h + 1]));
        const u32 code = mul_half2(fma_sat_half2(t, to_step, half), UNIT);
        if (tile > 0) e[b][2 * i + h] = sub_half2(y, fma_half2(code, up, middle));
        bytes[h][tile % PAIRS] = tile >= PAIRS ? code : fma_half2(bytes[h][tile], 0x4C004C00u, code);  // 16 of the upper half's
      }
    }
  }
}

// ---- blocks -------------------------------------------------------------------------------------------
// What keys and values differ in.
struct Side {
  const u16* rows; i64 stride; const uint4* matrix; const float* bias;
  int block, blocks, codes, scales;  // number `block` of `blocks`; bytes into a page
};

template <int DIM, bool METRIC, int OUTER, int CLIP> DEV void store_rows(const Args& a, const Side& side, u32 matrix) {
  constexpr int CHUNKS = (DIM + 31) / 32, TILES = DIM / 8, WORDS = (TILES / 2 + 1) / 2;
  constexpr bool AHEAD = DIM <= 128;  // the next rows wait in registers
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q4 = lane & 3, head = blockIdx.x;
  constexpr int MATRIX = TILES * (CHUNKS / OUTER) * 512;
  load_matrix<MATRIX, 256>(matrix, side.matrix);
  const u32 biases = matrix + MATRIX, table = biases + (1 + SINK) * DIM * 8;
#pragma unroll
  for (int i = 0; i <= SINK; i++) load_matrix<DIM * 8, 256>(biases + i * DIM * 8, side.bias + (i * a.kv_heads + head) * DIM * 2);
  const Metric metric{a.factor + (i64)head * (TILES / 2) * (TILES / 2) * 32, table + 16 * lane, lane};
  if (METRIC && TABLES_SHARED) load_matrix<DIM * DIM * 2, 256>(table, metric.factor);
  wait_predecessor();
  release_successor();
  const int mine = warp * 16 < a.block_tokens ? warp * 16 : a.tokens;  // other warps only help to load the matrix
  const int ahead = side.blocks * a.block_tokens;
  int t0 = side.block * a.block_tokens + mine;
  auto row_of = [&](int t) { return t < a.tokens ? side.rows + t * side.stride + head * DIM : nullptr; };
  const u32 one = 1 + ((u32)a.tokens >> 31);  // as far as the compiler knows, any number
  uint4 raw[CHUNKS][2];
  fetch_rows<CHUNKS, DIM>(raw, row_of(t0 + g), row_of(t0 + g + 8), q4);
  copy_wait<0>();
  __syncthreads();
  for (; t0 < a.tokens; t0 += ahead) {
    i64 slot[2];
    u32 start[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int t = t0 + g + 8 * h;
      slot[h] = t < a.tokens ? a.slots[t] : -1;
      start[h] = SINK && t < a.tokens && a.positions[t] == 0 ? biases + DIM * 8 : biases;
    }
    u32 y[2][TILES];
    multiply<CHUNKS, TILES, OUTER, SINK>(y, raw, one, matrix, start, lane);
    if (AHEAD) fetch_rows<CHUNKS, DIM>(raw, row_of(t0 + ahead + g), row_of(t0 + ahead + g + 8), q4);
    u32 words[2][WORDS];  // bytes 8 j + 2 q, + 1 of row h, for j = 2 m in the low half of word m and 2 m + 1 in the high half
    float norm[2], scale = 1.f / 512.f;  // of row g in lanes q = 0, 1, of row g + 8 in lanes 2, 3
    if constexpr (METRIC) {
      normalise<TILES>(y, norm, 7.5f / 512.f / (CLIP * 1e-3f));
      u32 bytes[2][TILES / 2];
      round_in_metric<TILES>(bytes, y, metric, one);
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int m = 0; m < WORDS; m++) words[h][m] = __byte_perm(bytes[h][2 * m], bytes[h][min(2 * m + 1, TILES / 2 - 1)], 0x6420);
    } else {
      normalise<TILES>(y, norm, 1.f);
      u32 codes[2][TILES / 2];
      scale = round_plain<TILES, CLIP>(codes, y, one, q4);
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int m = 0; m < WORDS; m++) {
          const u32 w0 = codes[h][2 * m], w1 = codes[h][min(2 * m + 1, TILES / 2 - 1)];
          words[h][m] = __byte_perm(w0, w1, 0x7632) * 16 + __byte_perm(w0, w1, 0x5410);
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
      u8* out = page + side.codes + in_page * (DIM / 2);
#pragma unroll
      for (int j = 0; j < TILES / 8; j++) *(uint2*)(out + 32 * j + 8 * q4) = quads[h][j];
#pragma unroll
      for (int j = TILES / 8 * 4; j < TILES / 2; j++) *((u16*)(out + 8 * j) + q4) = (u16)(words[h][j / 2] >> (16 * (j % 2)));
      if (q4 == 2 * h) *(u16*)(page + side.scales + in_page * 2) = (u16)pack_half(__fdividef(scale, norm[h]), 0.f);
    }
    if (!AHEAD) fetch_rows<CHUNKS, DIM>(raw, row_of(t0 + ahead + g), row_of(t0 + ahead + g + 8), q4);
  }
}

extern "C" __global__ void __launch_bounds__(256, D <= 128 && DV <= 128 ? 2 : 1) store(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  const u32 shared = smem_addr(smem);
  const int blocks = gridDim.y / 2, block = (int)blockIdx.y % blocks;
  const bool is_key = blockIdx.y < blocks;
  const uint4* wk = a.wk + (i64)blockIdx.x * (D / 8) * ((D + 31) / 32 / OUTER_K) * 32;
  // one field after another: a choice between two structures would be made in memory
  const Side side{is_key ? a.key : a.value, is_key ? a.key_stride : a.value_stride, is_key ? wk : a.wv, is_key ? a.key_bias : a.value_bias,
                  block, blocks, is_key ? 0 : PS * (D / 2), PS * (D / 2 + DV / 2 + (is_key ? 0 : 2))};
  if constexpr (!METRIC_KEYS && D == DV && OUTER_K == OUTER_V) store_rows<D, false, OUTER_K, KEY_CLIP>(a, side, shared);
  else if (is_key) store_rows<D, METRIC_KEYS, OUTER_K, KEY_CLIP>(a, side, shared);
  else store_rows<DV, false, OUTER_V, VALUE_CLIP>(a, side, shared);
}
