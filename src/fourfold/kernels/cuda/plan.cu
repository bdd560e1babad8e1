// Cuts the keys of a batch into equal runs, one for each thread block of a KV head (decode.cu).
//
// One block of 1,024 threads; runs once a step, on the device, so that graphs need no host copy of the lengths.
//   cum[b]   units (of `unit` tokens) before sequence b, cum[batch] all of them
//   runs[w]  where run w starts: (sequence, unit inside it, units of the run, tokens of the sequence) and
//            (first query row, query rows, units from there to the end of the sequence, 0)
//   meta[0]  units a run
// A sequence starts at its first visible token, rounded down to 16, if there is a window.
#include "mma.h"

struct Args {
  const int* lengths; const int* q_start;
  int* cum; int4* runs; int* meta;
  int batch, n_runs, unit, window, min_units;
};

extern "C" __global__ void __launch_bounds__(1024) plan(const __grid_constant__ Args a) {
  const int* lengths = a.lengths; const int* q_start = a.q_start;
  int* cum = a.cum; int4* runs = a.runs;
  const int batch = a.batch, n_runs = a.n_runs, unit = a.unit, window = a.window;
  __shared__ int warp_sums[32];
  __shared__ int carry, per;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (tid == 0) { carry = 0; cum[0] = 0; }
  wait_predecessor();
  release_successor();
  __syncthreads();
  for (int b0 = 0; b0 < batch; b0 += 1024) {
    const int b = b0 + tid;
    int n = 0;
    if (b < batch) {
      const int len = lengths[b], ql = q_start[b + 1] - q_start[b];
      const int first = window > 0 ? max(0, len - ql - window + 1) & ~15 : 0;
      if (len > 0 && ql > 0) n = (len - first + unit - 1) / unit;
    }
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
    const int before = carry + (warp ? warp_sums[warp - 1] : 0);
    if (b < batch) cum[b + 1] = before + x;
    __syncthreads();
    if (tid == 1023) carry = before + x;
    __syncthreads();
  }
  if (tid == 0) { per = max((carry + n_runs - 1) / n_runs, a.min_units); a.meta[0] = per; }
  __syncthreads();
  for (int w = tid; w < n_runs; w += 1024) {
    const int u = w * per;
    int lo = 0, hi = batch;                      // the last sequence with cum[lo] <= u
    while (hi - lo > 1) { const int mid = (lo + hi) / 2; if (cum[mid] <= u) lo = mid; else hi = mid; }
    const int units = min(per, carry - u);
    int4 first = make_int4(lo, u - cum[lo], units, 0), second = make_int4(0, 0, 0, 0);
    if (units > 0) { first.w = lengths[lo]; second = make_int4(q_start[lo], q_start[lo + 1] - q_start[lo], cum[lo + 1] - u, 0); }
    runs[2 * w] = first; runs[2 * w + 1] = second;
  }
}
