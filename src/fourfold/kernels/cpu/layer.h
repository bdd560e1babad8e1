// The three phases of one call: transform, attend, merge.
#pragma once
#include <omp.h>

#include <algorithm>
#include <vector>

#include "attend.h"
#include "plan.h"
#include "rows.h"

namespace ff {
class Layer {
 public:
  Layer(const ff_call& call, const Plan& plan) : c(call), p(plan), k_at(permutation(plan.D)), v_at(permutation(plan.DV)) {
    token_position.assign(c.tokens, -1);
    for (int s = 0; s < c.sequences; s++)
      for (int t = c.query_start[s]; t < c.query_start[s + 1] && t < c.tokens; t++)
        token_position[t] = c.seq_lens[s] - c.query_start[s + 1] + t;
  }

  void transform(bool queries) {
    const int blocks = (c.tokens + 3) / 4;
    const bool keys = c.key != nullptr && (c.slots != nullptr || c.raw);
#pragma omp parallel for collapse(2) schedule(static) num_threads(c.threads)
    for (int b = 0; b < blocks; b++)
      for (int h = 0; h < c.kv_heads; h++) {
        const int t0 = 4 * b, n = std::min<int>(4, c.tokens - t0);
        if (keys) transform_keys(t0, n, h);
        if (queries)
          for (int g = 0; g < p.G; g++) transform_query(t0, n, h, h * p.G + g);
      }
  }

  void attend() {
#pragma omp parallel num_threads(c.threads)
    {
      std::vector<float> tile((size_t)TILE * (p.SK + p.SV)), weights((size_t)ROWS * TILE);
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < p.items.size(); i++) attend_item(p.items[i], tile.data(), weights.data());
    }
  }

  void merge() {
#pragma omp parallel for schedule(static) num_threads(c.threads)
    for (size_t i = 0; i < p.tiles.size(); i++) merge_tile(p.tiles[i]);
  }

 private:
  const ff_call& c;
  const Plan& p;
  const std::vector<int> k_at, v_at;
  std::vector<int> token_position;

  uint8_t* head_page(int64_t page, int h) const { return c.cache + page * c.page_stride + h * c.head_stride; }

  void transform_keys(int t0, int n, int h) {
    alignas(32) float x[4][MAX_D], y[4][MAX_D];
    for (int kv = 0; kv < 2; kv++) {
      const bool is_key = kv == 0;
      const int D = is_key ? p.D : p.DV, slots = is_key ? p.SK : p.SV;
      const float* centre = (is_key ? c.key_centre : c.value_centre) + (size_t)h * D;
      const float* sink = (is_key ? c.sink_key : c.sink_value) + (size_t)h * D;
      const std::vector<int>& at = is_key ? k_at : v_at;
      for (int r = 0; r < n; r++) {
        const int64_t stride = is_key ? c.key_stride : c.value_stride;
        read_row(is_key ? c.key : c.value, (t0 + r) * stride + (int64_t)h * D, c.dtype, D, x[r]);
        for (int e = 0; e < D; e++) x[r][e] -= centre[e];
      }
      multiply(x, n, D, is_key ? c.key_matrix + (size_t)h * D * D : c.value_matrix, y);
      for (int r = 0; r < n; r++) {
        const int t = t0 + r;
        if (c.raw) {
          float* row = c.scratch + (is_key ? p.k_rows : p.v_rows) + ((int64_t)t * c.kv_heads + h) * slots;
          for (int s = 0; s < slots; s++) row[s] = at[s] < D ? y[r][at[s]] : 0.f;
        }
        if (c.slots == nullptr || c.slots[t] < 0) continue;
        if (token_position[t] == 0)
          for (int e = 0; e < D; e++) y[r][e] -= sink[e];
        uint8_t* page = head_page(c.slots[t] / c.block_size, h);
        const int64_t slot = c.slots[t] % c.block_size;
        const float* feedback = is_key && c.feedback != nullptr ? c.feedback + (size_t)h * D * D : nullptr;
        uint8_t* codes = page + (is_key ? 0 : c.v_codes) + slot * (D / 2);
        const uint16_t scale = quantise_row(y[r], D, is_key ? c.key_clips : c.value_clips,
                                            (int)(is_key ? c.key_clip_count : c.value_clip_count), feedback, codes);
        std::memcpy(page + (is_key ? c.k_scales : c.v_scales) + 2 * slot, &scale, 2);
      }
    }
  }

  void transform_query(int t0, int n, int h, int head) {
    alignas(32) float x[4][MAX_D], y[4][MAX_D];
    for (int r = 0; r < n; r++) read_row(c.query, (t0 + r) * c.query_stride + (int64_t)head * p.D, c.dtype, p.D, x[r]);
    multiply(x, n, p.D, c.query_matrix + (size_t)h * p.D * p.D, y);
    for (int r = 0; r < n; r++) {
      float* row = c.scratch + p.q_rows + ((int64_t)(t0 + r) * c.heads + head) * p.SK;
      for (int s = 0; s < p.SK; s++) row[s] = k_at[s] < p.D ? y[r][k_at[s]] : 0.f;
    }
  }

  struct Step {  // what the row-block functors need
    const float* const* q;
    float* s;
    const Codes *kc, *vc;
    Floats kf, vf;
    int kv_vectors[2], count;
    const float *alpha, *offset;
    float* const* o;
    bool packed, second;
    template <int RB>
    void run(int r) const {
      if (!second) {
        const float* rows[RB];
        for (int j = 0; j < RB; j++) rows[j] = q[r + j];
        const float* const(&fixed)[RB] = rows;
        if (packed) scores<RB>(*kc, fixed, kv_vectors[0], count, s + r * TILE);
        else scores<RB>(kf, fixed, kv_vectors[0], count, s + r * TILE);
      } else {
        float* rows[RB];
        for (int j = 0; j < RB; j++) rows[j] = o[r + j];
        float* const(&fixed)[RB] = rows;
        if (packed) weighted_sum<RB>(*vc, s + r * TILE, kv_vectors[1], count, alpha + r, offset + r, fixed);
        else weighted_sum<RB>(vf, s + r * TILE, kv_vectors[1], count, alpha + r, offset + r, fixed);
      }
    }
  };

  // One query tile against the splits of its item.  Splits and tiles begin at fixed tokens and are folded in their order,
  // whether one item or several compute them, and every row goes through the same sums: a query's output depends, to the
  // last bit, neither on the rows beside it nor on the rest of the batch.  So text does not depend on how a prompt is cut
  // into chunks or on how many drafts are verified at once.
  void attend_item(const Item& item, float* tile, float* s) {
    const int R = item.count * p.G, width = p.SV + 2;
    float* out = c.scratch + item.out;
    std::vector<float> part;
    for (int from = item.begin, to; from == item.begin || from < item.end; from = to) {
      to = std::min(item.end, (from / SPLIT + 1) * SPLIT);
      if (from == item.begin) {
        attend_split(item, from, to, tile, s, out);
        continue;
      }
      part.resize((size_t)R * width);
      attend_split(item, from, to, tile, s, part.data());
      for (int r = 0; r < R; r++) fold(out + (size_t)r * width, part.data() + (size_t)r * width, p.SV);
    }
  }

  void attend_split(const Item& item, int begin, int end, float* tile, float* s, float* out) {
    const int R = item.count * p.G, h = item.kv_head, q0 = c.query_start[item.sequence];
    const int n_new = c.query_start[item.sequence + 1] - q0, L = c.seq_lens[item.sequence];
    const int raw_from = c.raw && c.key ? std::max(0, L - n_new) : INT32_MAX;
    const bool coded = raw_from >= item.end, packed = coded && R <= DIRECT;
    const float* q[ROWS];
    float *o[ROWS], m[ROWS], l[ROWS], alpha[ROWS], offset[ROWS] = {}, q_sum[ROWS], sink_score[ROWS];
    alignas(32) float sink_key[MAX_D], sink_value[MAX_D];
    for (int x = 0; x < p.SK; x++) sink_key[x] = k_at[x] < p.D ? c.sink_key[(size_t)h * p.D + k_at[x]] : 0.f;
    for (int x = 0; x < p.SV; x++) sink_value[x] = v_at[x] < p.DV ? c.sink_value[(size_t)h * p.DV + v_at[x]] : 0.f;
    std::vector<float> scaled(packed ? (size_t)R * p.SK : 0);
    for (int r = 0; r < R; r++) {
      q[r] = c.scratch + p.q_rows + ((int64_t)(q0 + item.first + r / p.G) * c.heads + h * p.G + r % p.G) * p.SK;
      o[r] = out + (int64_t)r * (p.SV + 2);
      std::fill(o[r], o[r] + p.SV, 0.f);
      m[r] = -INFINITY, l[r] = 0.f;
      if (!coded) continue;
      f8 total = splat(0.f), at_sink = splat(0.f);
      for (int x = 0; x < p.SK; x += 8) total += load(q[r] + x), at_sink += load(q[r] + x) * load(sink_key + x);
      q_sum[r] = sum(total), sink_score[r] = sum(at_sink);
      if (!packed) continue;
      float* row = scaled.data() + (size_t)r * p.SK;
      for (int x = 0; x < p.SK; x += 8) store(row + x, load(q[r] + x) * splat(1.f / power16(x / 8 % 8)));
      q[r] = row;
    }
    const int32_t* pages = c.block_table + item.sequence * c.block_table_stride;
    for (int t0 = begin; t0 < end; t0 += TILE) {
      const int n = std::min(TILE, end - t0), count = (n + 7) / 8 * 8;
      Codes kc, vc;
      const uint16_t *ks[TILE / SUB], *vs[TILE / SUB];
      kc.row = p.D / 2, vc.row = p.DV / 2;
      for (int j = 0; j * SUB < n; j++) {
        const int t = t0 + j * SUB, slot = t % c.block_size;
        const uint8_t* page = head_page(pages[t / c.block_size], h);
        kc.sub[j] = page + (size_t)slot * kc.row;
        vc.sub[j] = page + c.v_codes + (size_t)slot * vc.row;
        ks[j] = (const uint16_t*)(page + c.k_scales) + slot;
        vs[j] = (const uint16_t*)(page + c.v_scales) + slot;
      }
      Floats kf{tile, p.SK}, vf{tile + (size_t)TILE * p.SK, p.SV};
      if (!packed) fill_tile(h, t0, n, coded, raw_from, q0 - (L - n_new), kc, vc, ks, vs, tile);
      Step step{q, s, &kc, &vc, kf, vf, {p.SK / 64, p.SV / 64}, count, alpha, offset, o, packed, false};
      if (packed) for_row_blocks<3>(R, step);
      else for_row_blocks<2>(R, step);
      for (int r = 0; r < R; r++) {
        float* row = s + r * TILE;
        if (coded) {
          for (int t = 0; t < count; t += 8)
            store(row + t, (load(row + t) - splat(ZERO_POINT * q_sum[r])) * halves(ks[t / SUB] + t % SUB));
          if (t0 == 0) row[0] += sink_score[r];
        }
        const int position = L - n_new + item.first + r / p.G;
        const int hi = std::min(n, c.causal ? position + 1 - t0 : L - t0);
        const int lo = c.window > 0 ? (int)std::max<int64_t>(0, position + 1 - c.window - t0) : 0;
        alpha[r] = softmax_tile(row, count, lo, hi, c.soft_cap, m[r], l[r]);
        if (coded) {
          const float first = row[0];
          f8 total = splat(0.f);
          for (int t = 0; t < count; t += 8) {
            const f8 w = load(row + t), scaled_w = blend(w > splat(0.f), w * halves(vs[t / SUB] + t % SUB), splat(0.f));
            total += scaled_w;
            store(row + t, scaled_w);
          }
          offset[r] = ZERO_POINT * sum(total);
          if (t0 == 0) sink_score[r] = first;  // from here on: the weight of position 0
        }
      }
      step.second = true;
      if (packed) for_row_blocks<3>(R, step);
      else for_row_blocks<4>(R, step);
      if (coded && t0 == 0)
        for (int r = 0; r < R; r++)
          for (int x = 0; x < p.SV; x += 8)
            store(o[r] + x, load(o[r] + x) + splat(sink_score[r]) * load(sink_value + x));
    }
    for (int r = 0; r < R; r++) o[r][p.SV] = m[r], o[r][p.SV + 1] = l[r];
  }

  // Tokens [t0, t0 + n) of one head as floats.  With `coded` the bare codes: scales, zero point and sink enter the scores and
  // weights as they do for codes in place.  Otherwise the values, the call's own tokens unquantised (raw mode).
  void fill_tile(int h, int t0, int n, bool coded, int raw_from, int raw_row, const Codes& kc, const Codes& vc,
                 const uint16_t* const* ks, const uint16_t* const* vs, float* tile) const {
    for (int kv = 0; kv < 2; kv++) {
      const int slots = kv ? p.SV : p.SK, D = kv ? p.DV : p.D;
      const Codes& codes = kv ? vc : kc;
      float* out = tile + (kv ? (size_t)TILE * p.SK : 0);
      for (int t = 0; t < (n + 7) / 8 * 8; t++, out += slots) {
        if (t >= n) {
          std::fill(out, out + slots, 0.f);
        } else if (coded) {
          unpack(codes, t, slots / 64, 0.f, 1.f, out);
        } else if (t0 + t >= raw_from) {
          const float* row = c.scratch + (kv ? p.v_rows : p.k_rows) + ((int64_t)(t0 + t + raw_row) * c.kv_heads + h) * slots;
          std::copy(row, row + slots, out);
        } else {
          unpack(codes, t, slots / 64, ZERO_POINT, half_to_float((kv ? vs : ks)[t / SUB][t % SUB]), out);
          if (t0 + t == 0) {
            const float* sink = (kv ? c.sink_value : c.sink_key) + (size_t)h * D;
            const std::vector<int>& at = kv ? v_at : k_at;
            for (int x = 0; x < slots; x++)
              if (at[x] < D) out[x] += sink[at[x]];
          }
        }
      }
    }
  }

  template <int I>
  static void unpack_nibble(const Codes& codes, int t, int v, float zero, float scale, float* out) {
    store(out + 64 * v + 8 * I, (codes.get<I>(t, v) * splat(1.f / power16(I)) - splat(zero)) * splat(scale));
  }
  static void unpack(const Codes& codes, int t, int vectors, float zero, float scale, float* out) {
    for (int v = 0; v < vectors; v++) {
      unpack_nibble<0>(codes, t, v, zero, scale, out), unpack_nibble<1>(codes, t, v, zero, scale, out);
      unpack_nibble<2>(codes, t, v, zero, scale, out), unpack_nibble<3>(codes, t, v, zero, scale, out);
      unpack_nibble<4>(codes, t, v, zero, scale, out), unpack_nibble<5>(codes, t, v, zero, scale, out);
      unpack_nibble<6>(codes, t, v, zero, scale, out), unpack_nibble<7>(codes, t, v, zero, scale, out);
    }
  }

  void merge_tile(const Tile& tile) {
    const int R = tile.count * p.G;
    const int64_t width = p.SV + 2;
    alignas(32) float x[4][MAX_D], y[4][MAX_D];
    for (int r0 = 0; r0 < R; r0 += 4) {
      const int rows = std::min(4, R - r0);
      for (int r = 0; r < rows; r++) {
        float* o = c.scratch + tile.out + (r0 + r) * width;
        for (int k = 1; k < tile.splits; k++) fold(o, o + k * R * width, p.SV);
        const float total = o[p.SV + 1];
        for (int s = 0; s < p.SV; s++)
          if (v_at[s] < p.DV) x[r][v_at[s]] = total > 0.f ? o[s] / total : 0.f;
      }
      multiply(x, rows, p.DV, c.value_inverse, y);
      for (int r = 0; r < rows; r++) {
        const int token = c.query_start[tile.sequence] + tile.first + (r0 + r) / p.G, head = tile.kv_head * p.G + (r0 + r) % p.G;
        const bool any = c.seq_lens[tile.sequence] > 0;
        for (int e = 0; e < p.DV; e++) y[r][e] = any ? y[r][e] + c.value_centre[(size_t)tile.kv_head * p.DV + e] : 0.f;
        write_row(c.output, token * c.output_stride + (int64_t)head * p.DV, c.dtype, p.DV, y[r]);
      }
    }
  }
};

}  // namespace ff
