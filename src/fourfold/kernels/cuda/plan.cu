// Cuts a batch into tiles of query rows, and the keys they see into equal runs, one for each thread block of a KV head.
//
// One block of 1,024 threads; runs once a step, on the device, so that graphs need no host copy of the lengths.
// A tile is up to `most` consecutive query tokens of one sequence; a decode is one tile, a prompt chunk many.
//   tiles[v]    (sequence, tokens that its last query sees, first query token, query tokens); zeros past the last tile
//   tile_of[t]  tile of query token t; -1 for a token of no sequence
//   cum[v]      units (of `unit` tokens of keys) before tile v, cum[n_tiles] all of them
//   runs[w]     where run w starts: (tile, unit inside it, units of the run, tokens that the tile sees) and
//               (first query token, query tokens, units from there to the end of the tile, sequence)
//   meta[0, 1]  what a run costs, and what a tile costs beside its units (`extra`)
// A tile's keys start at the first visible token, rounded down to 16, if there is a window.
#include "mma.h"

struct Args {
  const int* lengths; const int* q_start;
  int4* tiles; int4* runs; int* cum; int* tile_of; int* meta;
  int batch, tokens, n_tiles, most, n_runs, unit, window, extra;
};

// inclusive sum over the block's threads, plus everything of earlier calls in `carry`
DEV int running_sum(int n, int* warp_sums, int* carry) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int x = n;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) { const int y = __shfl_up_sync(FULL, x, o); if (lane >= o) x += y; }
  if (lane == 31) warp_sums[warp] = x;
  __syncthreads();
  if (warp == 0) {
    int s = warp_sums[lane];
#pragma unroll
    for (int o = 1; o < 32; o *= 2) { const int y = __shfl_up_sync(FULL, s, o); if (lane >= o) s += y; }
    warp_sums[lane] = s;
  }
  __syncthreads();
  x += *carry + (warp ? warp_sums[warp - 1] : 0);
  __syncthreads();
  if (threadIdx.x == 1023) *carry = x;
  __syncthreads();
  return x;
}

extern "C" __global__ void __launch_bounds__(1024) plan(const __grid_constant__ Args a) {
  __shared__ int warp_sums[32];
  __shared__ int carry;
  const int tid = threadIdx.x;
  if (tid == 0) { carry = 0; a.cum[0] = 0; }
  wait_predecessor();
  release_successor();
  for (int t = tid; t < a.tokens; t += 1024) a.tile_of[t] = -1;
  __syncthreads();
  // ---- tiles
  for (int b0 = 0; b0 < a.batch; b0 += 1024) {
    const int b = b0 + tid;
    int len = 0, q0 = 0, ql = 0;
    if (b < a.batch) { len = a.lengths[b]; q0 = a.q_start[b]; ql = a.q_start[b + 1] - q0; }
    const int n = ql > 0 ? (ql + a.most - 1) / a.most : 0;
    const int first = running_sum(n, warp_sums, &carry) - n;
    for (int i = 0; i < n && first + i < a.n_tiles; i++) {
      const int begin = i * a.most, end = min(begin + a.most, ql);
      a.tiles[first + i] = make_int4(b, len - ql + end, q0 + begin, end - begin);
    }
  }
  for (int v = carry + tid; v < a.n_tiles; v += 1024) a.tiles[v] = make_int4(0, 0, 0, 0);
  __syncthreads();
  const int n_real = carry;
  __syncthreads();
  if (tid == 0) carry = 0;
  __syncthreads();
  // ---- their units
  for (int v0 = 0; v0 < a.n_tiles; v0 += 1024) {
    const int v = v0 + tid;
    int n = 0;
    if (v < a.n_tiles) {
      const int4 tile = a.tiles[v];
      const int first = a.window > 0 ? max(0, tile.y - tile.w - a.window + 1) & ~15 : 0;
      if (tile.y > 0 && tile.w > 0) n = (tile.y - first + a.unit - 1) / a.unit;
      for (int t = 0; t < tile.w; t++) if (tile.z + t < a.tokens) a.tile_of[tile.z + t] = v;
    }
    const int sum = running_sum(n, warp_sums, &carry);
    if (v < a.n_tiles) a.cum[v + 1] = sum;
  }
  __syncthreads();  // `cum` is read by all threads from here on
  // ---- runs.  Tile v costs `extra` and its units, and so starts at cum[v] + v * extra of the whole cost.
  const int cost = carry + n_real * a.extra, per = max((cost + a.n_runs - 1) / a.n_runs, 1);
  if (tid == 0) { a.meta[0] = per; a.meta[1] = a.extra; }
  auto unit_at = [&](int position, int& tile) {      // units before this position of the cost, and the tile it is in
    int lo = 0, hi = a.n_tiles;
    while (hi - lo > 1) { const int mid = (lo + hi) / 2; if (a.cum[mid] + mid * a.extra <= position) lo = mid; else hi = mid; }
    tile = lo;
    return min(a.cum[lo] + max(position - a.cum[lo] - (lo + 1) * a.extra, 0), a.cum[lo + 1]);
  };
  for (int w = tid; w < a.n_runs; w += 1024) {
    int lo, other;
    const int u = unit_at(w * per, lo), units = unit_at((w + 1) * per, other) - u;
    int4 first = make_int4(lo, u - a.cum[lo], units, 0), second = make_int4(0, 0, 0, 0);
    if (units > 0) {
      while (lo + 1 < a.n_tiles && a.cum[lo + 1] <= u) lo++;  // the position may be in a tile without units
      const int4 tile = a.tiles[lo];
      first = make_int4(lo, u - a.cum[lo], units, tile.y);
      second = make_int4(tile.z, tile.w, a.cum[lo + 1] - u, tile.x);
    }
    a.runs[2 * w] = first; a.runs[2 * w + 1] = second;
  }
}
