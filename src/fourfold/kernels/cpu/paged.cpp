// 4-bit paged attention for CPUs: quantise-and-store, decode and chunked prefill, one call per layer.
//
// Three OpenMP phases over independent items:
//   1. transform  every new key, value and query (one matrix per head), quantise keys and values, store codes;
//   2. attend     per (sequence, KV head, query tile, KV split): tiles of 64 tokens, online softmax;
//   3. merge      the splits, rotate the output back, add the value centre, convert to the output dtype.
// All arithmetic is float32; the codes are the only other rounding.
#include "paged.h"

#include "layer.h"

extern "C" {

int64_t ff_scratch_floats(const ff_call* call) { return ff::Plan(*call).total; }

int64_t ff_attention(const ff_call* call) {
  const ff::Plan plan(*call);
  if (plan.total > call->scratch_floats) return 1;
  ff::Layer layer(*call, plan);
  layer.transform(true);
  layer.attend();
  layer.merge();
  return 0;
}

int64_t ff_store(const ff_call* call) {
  const ff::Plan plan(*call);
  ff::Layer(*call, plan).transform(false);
  return 0;
}

int64_t ff_sizeof_call(void) { return sizeof(ff_call); }
}
