// Position of each new token in its sequence: token t of [q_start[b], q_start[b + 1]) is at lengths[b] - q_start[b + 1] + t.
// Tokens of no sequence (the padding of a graph) get -1.
#include "mma.h"

struct Args {
  const int* lengths; const int* q_start; i64* out;
  int batch, tokens;
};

extern "C" __global__ void __launch_bounds__(256) positions(const __grid_constant__ Args a) {
  const int t = blockIdx.x * 256 + threadIdx.x;
  wait_predecessor();
  release_successor();
  if (t >= a.tokens) return;
  int lo = 0, hi = a.batch + 1;                  // the last b with q_start[b] <= t
  while (hi - lo > 1) { const int mid = (lo + hi) / 2; if (a.q_start[mid] <= t) lo = mid; else hi = mid; }
  a.out[t] = lo < a.batch ? a.lengths[lo] - a.q_start[lo + 1] + t : -1;
}
