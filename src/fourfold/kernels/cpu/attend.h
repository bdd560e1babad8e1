// Scores and weighted sums over one tile of tokens, for codes as they lie in the page and for float tiles.
//
// A row's result does not depend, to the last bit, on how many rows are computed beside it: every sum runs over the same
// terms in the same order in every instantiation, and powers of two are exact.
//
// Inside a tile a row of D elements lives in padded(D) "slots" (v, i, lane): nibble i of 32-bit word 8v + lane of a code
// row.  One mask and one conversion turn eight words into eight floats.  Nibble i stays where it is in its word, so its
// float is code * 16^i; the power is taken off the query beforehand (scores) or off the sum afterwards (values).
#pragma once
#include "vec.h"

namespace ff {

constexpr int TILE = 64;  // tokens per softmax step
constexpr int SUB = 16;   // tokens that surely share a page (block sizes are multiples of 16)

inline int padded(int d) { return (d + 63) / 64 * 64; }
// the element that sits in slot (v, i, lane) of a row of D elements; D for padding
inline int element(int D, int v, int i, int lane) {
  const int byte = 4 * (8 * v + lane) + (i >> 1);
  return byte < D / 2 ? byte + (i & 1) * (D / 2) : D;
}
inline float power16(int i) { return i == 7 ? 1.f : (float)(1u << (4 * i)); }  // nibble 7 is shifted down: 15 * 2^28 would be signed

template <int I>
inline f8 codes8(const uint8_t* words) {
  const i8 w = load_words(words);
  return I == 7 ? to_float((i8)((u8x)w >> 28)) : to_float(w & splat_i(15 << (4 * I)));
}

// Rows of codes in a page.  Reads up to 24 bytes past a row when D % 64 != 0: always inside the page, since scales follow
// the codes, and always finite; the query's padding slots are zero and the output's are dropped.
struct Codes {
  const uint8_t* sub[TILE / SUB];  // first row of each group of SUB tokens
  int row;                         // bytes per row
  static constexpr bool packed = true;
  template <int I>
  f8 get(int t, int v) const {
    return codes8<I>(sub[t / SUB] + (size_t)(t % SUB) * row + 32 * v);
  }
};

// Rows as floats, [TILE][slots]: codes that have been unpacked, or values.
struct Floats {
  const float* data;
  int slots;
  static constexpr bool packed = false;
  template <int I>
  f8 get(int t, int v) const {
    return load(data + (size_t)t * slots + 64 * v + 8 * I);
  }
};

template <int RB, int NT, int I, class Source>
inline void dot_step(const Source& k, const float* const (&q)[RB], int t, int v, f8 (&acc)[RB][NT]) {
  f8 qr[RB];
  for (int r = 0; r < RB; r++) qr[r] = load(q[r] + 64 * v + 8 * I);
  for (int j = 0; j < NT; j++) {
    const f8 c = k.template get<I>(t + j, v);
    for (int r = 0; r < RB; r++) acc[r][j] += qr[r] * c;
  }
}

// s[r][t] = q[r] . k[t] for t < count (rounded up to 8); the rows of q are in slots, already divided by power16 for codes
template <int RB, class Source>
void scores(const Source& k, const float* const (&q)[RB], int vectors, int count, float* s) {
  constexpr int NT = RB > 3 ? 2 : 4;
  for (int t = 0; t < count; t += 8) {
    f8 all[RB][8];
    for (int part = 0; part < 8; part += NT) {
      f8 acc[RB][NT] = {};
      for (int v = 0; v < vectors; v++) {
        dot_step<RB, NT, 0>(k, q, t + part, v, acc);
        dot_step<RB, NT, 1>(k, q, t + part, v, acc);
        dot_step<RB, NT, 2>(k, q, t + part, v, acc);
        dot_step<RB, NT, 3>(k, q, t + part, v, acc);
        dot_step<RB, NT, 4>(k, q, t + part, v, acc);
        dot_step<RB, NT, 5>(k, q, t + part, v, acc);
        dot_step<RB, NT, 6>(k, q, t + part, v, acc);
        dot_step<RB, NT, 7>(k, q, t + part, v, acc);
      }
      for (int r = 0; r < RB; r++)
        for (int j = 0; j < NT; j++) all[r][part + j] = acc[r][j];
    }
    for (int r = 0; r < RB; r++) store(s + r * TILE + t, sums(all[r]));
  }
}

template <int RB, int I0, int IN, class Source>
inline void sum_part(const Source& value, const float* p, int v, int count, const float* alpha, const float* offset, float* const (&o)[RB]) {
  f8 acc[RB][IN] = {};
  for (int t = 0; t < count; t++) {
    f8 c[IN];
    c[0] = value.template get<I0>(t, v);
    if constexpr (IN > 1) c[1] = value.template get<I0 + 1>(t, v);
    if constexpr (IN > 2) c[2] = value.template get<I0 + 2>(t, v);
    if constexpr (IN > 3) c[3] = value.template get<I0 + 3>(t, v);
    for (int r = 0; r < RB; r++) {
      const f8 w = splat(p[r * TILE + t]);
      for (int i = 0; i < IN; i++) acc[r][i] += w * c[i];
    }
  }
  for (int r = 0; r < RB; r++)
    for (int i = 0; i < IN; i++) {
      float* at = o[r] + 64 * v + 8 * (I0 + i);
      const f8 sum = (Source::packed ? acc[r][i] * splat(1.f / power16(I0 + i)) : acc[r][i]) - splat(offset[r]);
      store(at, load(at) * splat(alpha[r]) + sum);
    }
}

// o[r] = alpha[r] * o[r] + sum over t < count of p[r][t] * value[t] - offset[r] (the zero point of codes, once per tile
// rather than once per sequence: the running sums stay small and nothing cancels late)
template <int RB, class Source>
void weighted_sum(const Source& value, const float* p, int vectors, int count, const float* alpha, const float* offset,
                  float* const (&o)[RB]) {
  constexpr int IN = RB > 3 ? 2 : 4;
  for (int v = 0; v < vectors; v++) {
    if constexpr (IN == 4) {
      sum_part<RB, 0, 4>(value, p, v, count, alpha, offset, o);
      sum_part<RB, 4, 4>(value, p, v, count, alpha, offset, o);
    } else {
      sum_part<RB, 0, 2>(value, p, v, count, alpha, offset, o);
      sum_part<RB, 2, 2>(value, p, v, count, alpha, offset, o);
      sum_part<RB, 4, 2>(value, p, v, count, alpha, offset, o);
      sum_part<RB, 6, 2>(value, p, v, count, alpha, offset, o);
    }
  }
}

// Calls body(std::integral_constant<int, RB>) style functors for row blocks of at most BLOCK rows.
template <int BLOCK, class Body>
inline void for_row_blocks(int rows, const Body& body) {
  int r = 0;
  for (; r + BLOCK <= rows; r += BLOCK) body.template run<BLOCK>(r);
  if constexpr (BLOCK > 1) {
    switch (rows - r) {
      case 1: body.template run<1>(r); break;
      case 2: if constexpr (BLOCK > 2) body.template run<2>(r); break;
      case 3: if constexpr (BLOCK > 3) body.template run<3>(r); break;
    }
  }
}

// Adds one KV split's partial result to another's: rows of `slots` sums, the maximum, the sum of weights.  Never inlined,
// so that both callers round alike (a compiler may fuse either product of a sum of two).
__attribute__((noinline)) void fold(float* into, const float* part, int slots) {
  if (part[slots] == -INFINITY) return;
  const float top = std::fmax(into[slots], part[slots]);
  const float a = std::exp(into[slots] - top), b = std::exp(part[slots] - top);
  for (int e = 0; e < slots; e += 8) store(into + e, load(into + e) * splat(a) + load(part + e) * splat(b));
  into[slots + 1] = into[slots + 1] * a + part[slots + 1] * b;
  into[slots] = top;
}

// One row's share of an online softmax over a tile.  In: s[0..count) scores.  Tokens outside [lo, hi) of the tile get no
// weight, whatever their score (unused slots may hold NaN).  Out: s holds the weights; returns exp(m_old - m_new).
inline float softmax_tile(float* s, int count, int lo, int hi, float soft_cap, float& m, float& l) {
  const i8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
  const f8 none = splat(-INFINITY);
  f8 top = none;
  for (int t = 0; t < count; t += 8) {
    f8 x = load(s + t);
    if (soft_cap > 0.f)
      for (int j = 0; j < 8; j++) x[j] = soft_cap * std::tanh(x[j] / soft_cap);
    const i8 index = lane + t;
    x = blend((index >= lo) & (index < hi), x, none);
    top = maximum(top, x);
    store(s + t, x);
  }
  const float m_new = std::fmax(m, largest(top));
  f8 total = splat(0.f);
  if (m_new == -INFINITY) {
    for (int t = 0; t < count; t += 8) store(s + t, splat(0.f));
    return 1.f;
  }
  for (int t = 0; t < count; t += 8) {
    const f8 p = exp_nonpositive(load(s + t) - splat(m_new));
    total += p;
    store(s + t, p);
  }
  const float alpha = m == -INFINITY ? 0.f : std::exp(m - m_new);
  l = l * alpha + sum(total);
  m = m_new;
  return alpha;
}

}  // namespace ff
