// Attention of a few query rows per KV head over 4-bit pages, split over the KV length.
//
// Compile-time: D, DV (head sizes), GROUP (query heads a KV head), NB (blocks of 8 query rows), NT (16-token tiles a
// warp handles at once), NW (warps), ST (copy stages), PS (block size), SOFTCAP, WINDOW, SINK (0/1), MINB (blocks an SM), ACT_BF16.
//
// Work: the flattened list of (query tile, unit) of one KV head is cut into equal runs, one a thread block (plan.cu), so
// a batch of ragged lengths, decodes and prompt chunks alike, is balanced and the grid is fixed.  A unit is NW * 16 * NT
// tokens; warp w takes the w-th part of each.  Block `run` writes one partial result per tile it touches, in slot
// run + tile.  Blocks of one warp stream through their tiles without a stop; several warps drain their rings at the end
// of a tile, where they merge, and write a quarter of the partial results.
//
// Products: tokens are the M side of both products, query rows the N side.
//   S^T[16 tokens, 8 rows] = K[16, D] q[D, 8]: a row of K codes comes out of ldmatrix as words of 8 codes; code & 15 is
//   the fp16 denormal c * 2^-24 and (code << 4) & 0xF0 is c * 2^-20, so one AND turns two codes into two exact fp16
//   numbers, and the 2^-4 between the two kinds sits in q (query.cu).  -7.5 sum(q) is the initial accumulator.
//   O^T[DV, 8 rows] = V^T[DV, 16 tokens] P^T[16, 8 rows]: ldmatrix.trans pairs two tokens' codes in one register, and
//   movmatrix turns the accumulators of S^T into the operand P^T.  A row of ones gives sum(P) for the offset.
// Pages and plan are read before the wait for the preceding kernel, so that must be query.cu, launched to wait for all
// earlier work (decode.py).
// The running maximum is only raised when a score exceeds it by 2^8 (a vote), so the usual tile has no reduction.
#include "ring.h"

constexpr int ROWS = 8 * NB;
constexpr bool Q_SHARED = NB > 1;                      // query operand in shared memory instead of registers
constexpr int Q_BYTES = Q_SHARED ? NB * CK * 512 : 0;
constexpr float HEAD = 6.f, LIMIT = 14.f;              // log2 of the largest weight after a raise, and before the next
constexpr u32 LOW = 0x000F000Fu, HIGH = 0x00F000F0u;

struct Args {
  const u8* cache; i64 page_stride, head_stride;        // bytes
  const int* table; int table_stride;                   // block table [sequences, table_stride]
  const int4* tiles; const int* cum; const int4* runs;  // plan: query tiles, units before each, where each run starts (plan.cu)
  const u16* q; const float2* aux;                      // query operand [tokens, H, 32 CK]; (-7.5 * 2^-24 sum q, sink score)
  float* po; float* pm;                                 // partials [HK, slots, rows, DV] and [.., R, 4] (maximum, sum, weight of token 0, -)
  int kv_heads, rows, slots, n_tiles, window;           // rows: of a tile, query tokens * GROUP, at most 8 NB
  float k_factor, cap;                                  // k_factor undoes the scaling of codes and q (and divides by cap)
};

extern "C" __global__ void __launch_bounds__(NW * 32, MINB) decode(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q4 = lane & 3;
  const int run = blockIdx.x, hk = blockIdx.y;
  const u32 base = smem_addr(smem), q_shared = base, ring = base + Q_BYTES + warp * RING, scales = ring + COPIES;
  u32 krow[(CK + 1) / 2], vrow[(CV + 1) / 2];
#pragma unroll
  for (int i = 0; i < (CK + 1) / 2; i++) krow[i] = matrix_row<RK, CK>(i, lane);
#pragma unroll
  for (int i = 0; i < (CV + 1) / 2; i++) vrow[i] = matrix_row<RV, CV>(i, lane);
  const int4 start = a.runs[2 * run], start2 = a.runs[2 * run + 1];
  int tile = start.x, unit = start.y, left = start.z, len = start.w, q0 = start2.x, ql = start2.y, in_tile = start2.z;
  if (left <= 0) {
    if (run == 0) wait_predecessor();  // a grid must not end before its predecessor; run 0 has work if any has
    return;
  }
  // ---- copies: each warp fills its own ring, a unit of the run at a time, on into the next tiles.  The next unit's page
  // numbers are on their way while a unit is worked on, and lane i knows tile `known + i`.
  const int total = left;
  int made = 0;                                              // units copied
  int c_tile = tile, c_units = min(in_tile, left), c_len = len, c_row = start2.w * a.table_stride;  // tile of the next unit
  int c_at = (WINDOW ? max(0, len - ql - a.window + 1) & ~15 : 0) + unit * UNIT + warp * TILE;      // its first token
  int known = tile + 1, t_seq = 0, t_len = 0, t_first = 0;
  auto know = [&]() {
    const int4 v = known + lane < a.n_tiles ? a.tiles[known + lane] : make_int4(0, 0, 0, 0);
    t_seq = v.x; t_len = v.w > 0 ? v.y : 0;
    if (WINDOW) t_first = max(0, v.y - v.w - a.window + 1) & ~15;
  };
  auto next_tile = [&]() {
    do {
      if (++c_tile - known == 32) { known += 32; know(); }
      c_len = __shfl_sync(FULL, t_len, c_tile - known);
    } while (c_len <= 0);
    const int first = WINDOW ? __shfl_sync(FULL, t_first, c_tile - known) : 0;
    c_row = __shfl_sync(FULL, t_seq, c_tile - known) * a.table_stride;
    c_units = (c_len - first + UNIT - 1) / UNIT;
    c_at = first + warp * TILE;
  };
  auto group = [&](int t) { t = min(t, (c_len - 1) & ~15); return __ldg(a.table + c_row + t / PS) * (PS / 16) + t % PS / 16; };
  int at[NT];  // 16-token groups of the next unit, counted over all pages
  auto copy_groups = [&](const int (&at)[NT], int stage) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const u32 in_page = (u32)at[n] % (PS / 16) * 16;
      const u8* src = a.cache + (u32)at[n] / (PS / 16) * a.page_stride + hk * a.head_stride;
      const u32 dst = ring + stage * STAGE + n * (KB + VB);
      copy_rows<D / 2, RK>(dst, src + in_page * (D / 2), lane);
      copy_rows<DV / 2, RV>(dst + KB, src + PS * (D / 2) + in_page * (DV / 2), lane);
      if (lane < 4) copy16(scales + stage * SCALES + n * 64 + lane * 16, src + PS * (D / 2 + DV / 2) + in_page * 2 + (lane & 1) * 16 + (lane >> 1) * (2 * PS));
    }
  };
  auto turn = [&]() {  // to the next unit, which exists
    if (c_units == 0) next_tile();
#pragma unroll
    for (int n = 0; n < NT; n++) at[n] = group(c_at + 16 * n);
  };
  auto copy = [&](int stage) {
    if (c_at < c_len) copy_groups(at, stage);
    made++; c_units--; c_at += UNIT;
    if (made < total) turn();
  };
  // ---- the query operand, the only thing that the preceding kernel makes
  u32 qb[Q_SHARED ? 1 : NB][Q_SHARED ? 1 : CK][4];
  float q_off[NB][4], sink[NB][2];
  auto load_query = [&]() {
    // Rows past the last read that one and become zero.  As a branch around the load this was miscompiled (NVRTC 13.0,
    // blocks of one warp): lanes that skipped it overwrote a uniform register that the others had yet to read.
    const int last = ql * GROUP - 1;
#pragma unroll
    for (int n = 0; n < NB; n++) {
      const int r = min(8 * n + g, last);
      const bool ok = 8 * n + g <= last;
      const u16* src = a.q + ((i64)(q0 + r / GROUP) * a.kv_heads * GROUP + hk * GROUP + r % GROUP) * (32 * CK) + 8 * q4;
#pragma unroll
      for (int c = 0; c < CK; c++) {
        uint4 v = *(const uint4*)(src + 32 * c);
        v.x = ok ? v.x : 0; v.y = ok ? v.y : 0; v.z = ok ? v.z : 0; v.w = ok ? v.w : 0;
        if constexpr (Q_SHARED) { if (warp == 0) *(uint4*)(smem + ((n * CK + c) * 32 + lane) * 16) = v; }
        else { qb[n][c][0] = v.x; qb[n][c][1] = v.y; qb[n][c][2] = v.z; qb[n][c][3] = v.w; }
      }
#pragma unroll
      for (int x = 0; x < 2; x++) {
        const int r2 = min(8 * n + 2 * q4 + x, last);
        const float2 v = a.aux[(i64)(q0 + r2 / GROUP) * a.kv_heads * GROUP + hk * GROUP + r2 % GROUP];
        const bool ok2 = 8 * n + 2 * q4 + x <= last;
        q_off[n][x] = q_off[n][2 + x] = ok2 ? v.x : 0.f; sink[n][x] = ok2 ? v.y : 0.f;
      }
    }
  };
  int allowed = NW == 1 ? total : min(in_tile, left);  // units that may be copied: with several warps the ring is drained
                                                        // at a tile's end, and then serves to merge them
  if (c_units < total) know();
  const int direct = min(ST - 1, c_units);
  {  // the first units are of the run's first tile: all page numbers at once, one latency together
    int ahead[ST - 1][NT];
#pragma unroll
    for (int i = 0; i < ST - 1; i++)
#pragma unroll
      for (int n = 0; n < NT; n++) ahead[i][n] = group(c_at + min(i, direct - 1) * UNIT + 16 * n);
#pragma unroll
    for (int i = 0; i < ST - 1; i++) {
      if (i >= direct) break;
      if (c_at + i * UNIT < c_len) copy_groups(ahead[i], i);
      copy_commit();
    }
    made = direct; c_units -= direct; c_at += direct * UNIT;
    if (made < total) turn();
  }
#pragma unroll
  for (int i = 1; i < ST - 1; i++)
    if (i >= direct) { if (made < allowed) copy(i); copy_commit(); }
  wait_predecessor();
  release_successor();
  load_query();
  int stage = 0;
  while (true) {
    const int n_units = min(in_tile, left);
    const int first = WINDOW ? max(0, len - ql - a.window + 1) & ~15 : 0;
    const int begin = first + unit * UNIT, end = min(begin + n_units * UNIT, len);  // the run's keys of the tile
    if (Q_SHARED) { if constexpr (NW == 1) __syncwarp(); else __syncthreads(); }
    const int all_visible = len - ql + 1;                  // tokens before this need no causal mask
    const int all_inside = WINDOW ? len - a.window : 0;    // tokens from here on need no window mask
    float v_norm = 0.f;                                    // power of two that keeps this warp's value scales at or below 2
    float m[NB][2] = {}, limit[NB][2], l[NB][2] = {}, p0[NB][2] = {}, acc[NB][2 * CV][4] = {}, ones[NB][4] = {};
#pragma unroll
    for (int n = 0; n < NB; n++) limit[n][0] = limit[n][1] = -1e30f;
    for (int t0 = begin + warp * TILE; t0 < end; t0 += UNIT) {
      copy_wait<ST - 2>();
      __syncwarp();
      const u32 staged = ring + stage * STAGE, tile_scales = scales + stage * SCALES;
      const bool whole = t0 + TILE <= all_visible && t0 >= all_inside && !(SINK && t0 == 0);
      // ---- scores
      float s[NT][NB][4];
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float d[NB][4];
#pragma unroll
        for (int i = 0; i < (CK + 1) / 2; i++) {
          u32 w[4];
          ldmatrix4(w, staged + n * (KB + VB) + krow[i]);
#pragma unroll
          for (int c = 2 * i; c < min(2 * i + 2, CK); c++) {
            const u32 w0 = w[c % 2 * 2], w1 = w[c % 2 * 2 + 1];
#pragma unroll
            for (int b = 0; b < NB; b++) {
              u32 q[4];
              if constexpr (Q_SHARED) { const uint4 v = lds128(q_shared + ((b * CK + c) * 32 + lane) * 16); q[0] = v.x; q[1] = v.y; q[2] = v.z; q[3] = v.w; }
              else { q[0] = qb[b][c][0]; q[1] = qb[b][c][1]; q[2] = qb[b][c][2]; q[3] = qb[b][c][3]; }
              if (c == 0) mma_f16(d[b], w0 & LOW, w1 & LOW, w0 & HIGH, w1 & HIGH, q[0], q[1], q_off[b]);
              else mma_f16(d[b], w0 & LOW, w1 & LOW, w0 & HIGH, w1 & HIGH, q[0], q[1], d[b]);
              mma_f16(d[b], (w0 >> 8) & LOW, (w1 >> 8) & LOW, (w0 >> 8) & HIGH, (w1 >> 8) & HIGH, q[2], q[3], d[b]);
            }
          }
        }
        const u32 ks = lds32(tile_scales + n * 64 + 4 * g);
        const float k0 = half_lo(ks) * a.k_factor, k1 = half_hi(ks) * a.k_factor;
#pragma unroll
        for (int b = 0; b < NB; b++)
#pragma unroll
          for (int x = 0; x < 4; x++) {
            const float k = x < 2 ? k0 : k1;
            if constexpr (SOFTCAP) {  // cap * tanh(score / cap), in units of log2
              float z = d[b][x] * k;
              if (SINK && t0 == 0 && n == 0 && g == 0 && x < 2) z += sink[b][x] / a.cap;
              s[n][b][x] = a.cap * (1.f - __fdividef(2.f, 1.f + exp2_(fminf(2.885390081777927f * z, 120.f)))) - m[b][x & 1];
            } else {
              s[n][b][x] = fmaf(d[b][x], k, -m[b][x & 1]);
              if (SINK && t0 == 0 && n == 0 && g == 0 && x < 2) s[n][b][x] += sink[b][x];
            }
          }
      }
      float vs[NT][2];
#pragma unroll
      for (int n = 0; n < NT; n++) { const u32 v = lds32(tile_scales + n * 64 + 32 + 4 * g); vs[n][0] = half_lo(v); vs[n][1] = half_hi(v); }
      if (!whole) {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int x = 0; x < 4; x++) {
            const int t = t0 + 16 * n + 2 * g + (x >> 1);
            if (t >= end) vs[n][x >> 1] = 0.f;  // an unused slot may hold anything, a NaN too
#pragma unroll
            for (int b = 0; b < NB; b++) {
              const int row = 8 * b + 2 * q4 + (x & 1), position = len - ql + row / GROUP;
              if (t > position || t >= end || (WINDOW && t + a.window <= position)) s[n][b][x] = -1e30f;
            }
          }
      }
      // ---- raise the running maxima if any weight would exceed 2^LIMIT
      bool high = false;
#pragma unroll
      for (int n = 0; n < NT; n++) {
        high |= fmaxf(vs[n][0], vs[n][1]) * v_norm > 2.f;
#pragma unroll
        for (int b = 0; b < NB; b++)
#pragma unroll
          for (int x = 0; x < 2; x++) high |= fmaxf(s[n][b][x], s[n][b][2 + x]) > limit[b][x];
      }
      if (__any_sync(FULL, high)) {
        float top = 0.f;
#pragma unroll
        for (int n = 0; n < NT; n++) top = fmaxf(top, fmaxf(vs[n][0], vs[n][1]));
        u32 bits = __reduce_max_sync(FULL, __float_as_uint(top));
        float norm = __uint_as_float((253u << 23) - (bits & 0x7f800000u));  // brings top into [1/2, 1)
        float keep = 1.f;
        if (v_norm == 0.f) v_norm = norm;
        else if (norm < v_norm) { keep = __fdividef(norm, v_norm); v_norm = norm; }
#pragma unroll
        for (int b = 0; b < NB; b++)
#pragma unroll
          for (int x = 0; x < 2; x++) {
            float mx = -1e30f;
#pragma unroll
            for (int n = 0; n < NT; n++) mx = fmaxf(mx, fmaxf(s[n][b][x], s[n][b][2 + x]));
#pragma unroll
            for (int o = 4; o < 32; o *= 2) mx = fmaxf(mx, __shfl_xor_sync(FULL, mx, o));
            float factor = 1.f;
            if (mx > limit[b][x]) {
              const float up = mx - HEAD;  // what the maximum rises by
              factor = limit[b][x] < 0.f ? 0.f : exp2_(-up);
              m[b][x] += up; limit[b][x] = LIMIT; l[b][x] *= factor; p0[b][x] *= factor;
#pragma unroll
              for (int n = 0; n < NT; n++) { s[n][b][x] -= up; s[n][b][2 + x] -= up; }
            }
            factor *= keep;
            ones[b][x] *= factor; ones[b][2 + x] *= factor;
#pragma unroll
            for (int u = 0; u < 2 * CV; u++) { acc[b][u][x] *= factor; acc[b][u][2 + x] *= factor; }
          }
      }
      // ---- weights and their product with the values
#pragma unroll
      for (int n = 0; n < NT; n++) {
        u32 p[NB][2];
        const float v0 = vs[n][0] * v_norm, v1 = vs[n][1] * v_norm;
#pragma unroll
        for (int b = 0; b < NB; b++) {
          float e[4];
#pragma unroll
          for (int x = 0; x < 4; x++) e[x] = exp2_(s[n][b][x]);
          l[b][0] += e[0] + e[2]; l[b][1] += e[1] + e[3];
          if (SINK && t0 == 0 && n == 0 && g == 0) { p0[b][0] = e[0]; p0[b][1] = e[1]; }
          p[b][0] = transpose8x8(pack_half(e[0] * v0, e[1] * v0));
          p[b][1] = transpose8x8(pack_half(e[2] * v1, e[3] * v1));
          mma_f16(ones[b], 0x3C003C00u, 0x3C003C00u, 0x3C003C00u, 0x3C003C00u, p[b][0], p[b][1], ones[b]);
        }
#pragma unroll
        for (int i = 0; i < (CV + 1) / 2; i++) {
          u32 w[4];
          ldmatrix4_trans(w, staged + n * (KB + VB) + KB + vrow[i]);
#pragma unroll
          for (int c = 2 * i; c < min(2 * i + 2, CV); c++) {
            const u32 w0 = w[c % 2 * 2], w1 = w[c % 2 * 2 + 1];
#pragma unroll
            for (int b = 0; b < NB; b++) {
              mma_f16(acc[b][2 * c], w0 & LOW, w0 & HIGH, w1 & LOW, w1 & HIGH, p[b][0], p[b][1], acc[b][2 * c]);
              mma_f16(acc[b][2 * c + 1], (w0 >> 8) & LOW, (w0 >> 8) & HIGH, (w1 >> 8) & LOW, (w1 >> 8) & HIGH, p[b][0], p[b][1], acc[b][2 * c + 1]);
            }
          }
        }
      }
      __syncwarp();  // every lane is done with this stage's predecessor before it is overwritten
      const int free_stage = stage == 0 ? ST - 1 : stage - 1;
      if (made < allowed) copy(free_stage);
      copy_commit();
      if (++stage == ST) stage = 0;
    }

    // ---- on to the next tile
    const float undo = v_norm > 0.f ? 1.f / v_norm : 0.f;
    const int rows = ql * GROUP;
    const i64 slot = ((i64)hk * a.slots + run + tile) * a.rows;
    left -= n_units;
    if (left > 0) {
      for (in_tile = 0; in_tile == 0;) { tile++; in_tile = a.cum[tile + 1] - a.cum[tile]; }
      const int4 v = a.tiles[tile];
      len = v.y; q0 = v.z; ql = v.w; unit = 0;
    }
    if constexpr (NW > 1) {
      copy_wait<0>();
      __syncwarp();
      allowed += min(in_tile, left);
      stage = 0;
#pragma unroll
      for (int i = 0; i < EARLY; i++) { if (made < allowed) copy(i); copy_commit(); }
    }
    if (!Q_SHARED && left > 0) load_query();
    if constexpr (NW == 1) {  // write the tile's partial result
#pragma unroll
      for (int b = 0; b < NB; b++)
#pragma unroll
        for (int x = 0; x < 2; x++) {
#pragma unroll
          for (int o = 4; o < 32; o *= 2) { l[b][x] += __shfl_xor_sync(FULL, l[b][x], o); if (SINK) p0[b][x] += __shfl_xor_sync(FULL, p0[b][x], o); }
          const int r = 8 * b + 2 * q4 + x;
          if (r >= rows) continue;
          if (g == 0) *(float4*)(a.pm + (slot + r) * 4) = make_float4(l[b][x] > 0.f ? m[b][x] : -1e30f, l[b][x], p0[b][x], 0.f);
          const float offset = 7.5f * ones[b][x];
#pragma unroll
          for (int u = 0; u < 2 * CV; u += 2) {
            const int e = 8 * u + 2 * g;
            if (DV % 32 == 0 || e < DV / 2) {
              float* to = a.po + (slot + r) * DV + e;
              *(float2*)to = make_float2((acc[b][u][x] * 16777216.f - offset) * undo, (acc[b][u + 1][x] * 16777216.f - offset) * undo);
              *(float2*)(to + DV / 2) = make_float2((acc[b][u][2 + x] * 1048576.f - offset) * undo, (acc[b][u + 1][2 + x] * 1048576.f - offset) * undo);
            }
          }
        }
      if (left <= 0) break;
      if (Q_SHARED) { __syncwarp(); load_query(); }
      continue;
    }
    // ---- merge the warps (through the ring's last stages) and write the tile's partial result
    auto part = [&](int w, int r, int e) { return (float*)(smem + Q_BYTES + w * RING + COPIES - EXCHANGE) + r * (32 * CV) + ((e / 4 ^ r) * 4 + e % 4); };
    auto stats = [&](int w, int r) { return (float*)(smem + Q_BYTES + w * RING + COPIES + (ST - 1) * SCALES) + 3 * r; };
#pragma unroll
    for (int b = 0; b < NB; b++) {
      if (8 * b >= rows) break;
      if (b) __syncthreads();
#pragma unroll
      for (int x = 0; x < 2; x++) {
#pragma unroll
        for (int o = 4; o < 32; o *= 2) { l[b][x] += __shfl_xor_sync(FULL, l[b][x], o); if (SINK) p0[b][x] += __shfl_xor_sync(FULL, p0[b][x], o); }
        const int r = 2 * q4 + x;
        if (g == 0) { float* st = stats(warp, r); st[0] = l[b][x] > 0.f ? m[b][x] : -1e30f; st[1] = l[b][x]; st[2] = p0[b][x]; }
        const float offset = 7.5f * ones[b][x];
#pragma unroll
        for (int u = 0; u < 2 * CV; u++) {
          const int e = 16 * (u / 2) + 2 * g + (u & 1);
          if (DV % 32 == 0 || e < DV / 2) {
            *part(warp, r, e) = (acc[b][u][x] * 16777216.f - offset) * undo;
            *part(warp, r, e + DV / 2) = (acc[b][u][2 + x] * 1048576.f - offset) * undo;
          }
        }
      }
      __syncthreads();
      const int count = min(rows - 8 * b, 8);
      for (int i = threadIdx.x; i < count * (DV / 4); i += NW * 32) {
        const int r = i / (DV / 4), c = i % (DV / 4) * 4;
        float top = -1e30f;
#pragma unroll
        for (int w = 0; w < NW; w++) top = fmaxf(top, stats(w, r)[0]);
        float4 o = make_float4(0.f, 0.f, 0.f, 0.f); float z = 0.f, first_weight = 0.f;
#pragma unroll
        for (int w = 0; w < NW; w++) {
          const float* st = stats(w, r); const float f = st[1] > 0.f ? exp2_(st[0] - top) : 0.f;
          const float4 v = *(const float4*)part(w, r, c);
          z += f * st[1]; first_weight += f * st[2];
          o.x += f * v.x; o.y += f * v.y; o.z += f * v.z; o.w += f * v.w;
        }
        *(float4*)(a.po + (slot + 8 * b + r) * DV + c) = o;
        if (c == 0) { *(float4*)(a.pm + (slot + 8 * b + r) * 4) = make_float4(top, z, first_weight, 0.f); }
      }
    }
    if (left <= 0) break;
    __syncthreads();
#pragma unroll
    for (int i = EARLY; i < ST - 1; i++) { if (made < allowed) copy(i); copy_commit(); }
    if (Q_SHARED) load_query();
  }
}
