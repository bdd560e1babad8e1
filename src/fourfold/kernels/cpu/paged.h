// The C struct through which the caller describes one layer's call.  Field for field the same as `Call` in binding.py,
// which asserts sizeof.  All pointers are to contiguous, row-major memory unless a stride is given.
#pragma once
#include <cstdint>

extern "C" {

enum { FF_FLOAT32 = 0, FF_BFLOAT16 = 1, FF_FLOAT16 = 2 };

struct ff_call {
  // shapes
  int64_t tokens;        // new tokens in this call, T
  int64_t sequences;     // S
  int64_t heads;         // query heads, H
  int64_t kv_heads;      // KV heads, HK; H is a multiple of it
  int64_t head_size;     // elements of a query and a key, D
  int64_t head_size_v;   // elements of a value, DV
  int64_t block_size;    // tokens per page
  int64_t dtype;         // of query, key, value and output
  int64_t threads;
  // page layout, bytes (PageLayout)
  int64_t page_stride, head_stride, v_codes, k_scales, v_scales;
  // the cache and its tables
  uint8_t* cache;                // [pages, HK, head_stride]
  const int32_t* block_table;    // [S, block_table_stride]
  int64_t block_table_stride;
  const int32_t* query_start;    // [S + 1] first new token of each sequence
  const int32_t* seq_lens;       // [S] tokens including the new ones; 0 for padding
  const int64_t* slots;          // [T] slot of each new token, negative: do not store; null: store nothing
  // activations
  const void* query;             // [T, H, D], strides in elements
  const void* key;               // [T, HK, D] or null
  const void* value;             // [T, HK, DV] or null
  void* output;                  // [T, H, DV]
  int64_t query_stride, key_stride, value_stride, output_stride;  // from token to token
  // transform (quant/transform.py), float32
  const float* key_centre;       // [HK, D]      subtracted from every key
  const float* key_matrix;       // [HK, D, D]   k' = (k - centre) A
  const float* query_matrix;     // [HK, D, D]   q' = q B, B = A^-T, softmax scale included
  const float* value_centre;     // [HK, DV]
  const float* value_matrix;     // [DV, DV]     v' = (v - centre) R
  const float* value_inverse;    // [DV, DV]     R^T
  const float* sink_key;         // [HK, D]      added centre of position 0, transformed basis
  const float* sink_value;       // [HK, DV]
  const float* feedback;         // [HK, D, D]   LayerParams.feedback, or null: plain rounding of keys
  const float* key_clips;        // [key_clip_count] candidates, fractions of the absolute maximum
  const float* value_clips;      // [value_clip_count]
  int64_t key_clip_count, value_clip_count;
  // attention
  float soft_cap;                // 0: none
  int64_t window;                // sliding window in tokens, 0: none
  int64_t raw;                   // 1: the new tokens of a call attend to each other unquantised
  int64_t causal;
  // scratch owned by the caller
  float* scratch;
  int64_t scratch_floats;
};

// Floats of scratch that `call` needs (only shapes, query_start and seq_lens are read).
int64_t ff_scratch_floats(const ff_call* call);
// Runs one layer.  Returns 0, or 1 when the scratch is too small (nothing is written then).
int64_t ff_attention(const ff_call* call);
// Quantises and stores without attending (query and output are not read).
int64_t ff_store(const ff_call* call);
int64_t ff_sizeof_call(void);
}
