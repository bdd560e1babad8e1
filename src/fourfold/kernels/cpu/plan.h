// Cuts one call into independent work items and lays out its scratch.
#pragma once
#include <algorithm>
#include <vector>

#include "attend.h"
#include "paged.h"

namespace ff {

constexpr int SPLIT = 1024;  // tokens per KV split, at multiples of it; see Layer::attend_item on why that is fixed
constexpr int ROWS = 64;     // query rows (tokens x heads of a group) of a tile
constexpr int DIRECT = 8;    // up to this many rows attend to codes in place; more share a tile of unpacked codes

struct Item {  // one query tile against one KV split
  int sequence, kv_head, first, count;  // new tokens [first, first + count) of the sequence
  int begin, end;                       // tokens of context
  int64_t out;                          // its [count * G, slots_v + 2] rows in scratch
};
struct Tile {  // one query tile and its splits
  int sequence, kv_head, first, count, splits;
  int64_t out;
};

struct Plan {
  int D, DV, SK, SV, G;  // head sizes, slots per row, group size
  int64_t q_rows, k_rows, v_rows, partials, total;  // offsets into scratch, floats
  std::vector<Item> items;
  std::vector<Tile> tiles;

  explicit Plan(const ff_call& c) : D(c.head_size), DV(c.head_size_v), SK(padded(D)), SV(padded(DV)), G(c.heads / c.kv_heads) {
    q_rows = 0;
    k_rows = q_rows + c.tokens * c.heads * SK;
    v_rows = k_rows + (c.raw ? c.tokens * c.kv_heads * SK : 0);
    partials = v_rows + (c.raw ? c.tokens * c.kv_heads * SV : 0);
    int64_t at = partials;
    const int step = std::max(1, ROWS / G);
    for (int s = 0; s < c.sequences; s++) {
      const int q0 = c.query_start[s], n = c.query_start[s + 1] - q0, L = c.seq_lens[s];
      if (n <= 0) continue;
      for (int first = 0; first < n; first += step) {
        const int count = std::min(step, n - first);
        const int end = c.causal ? std::max(0, L - n + first + count) : L;
        int begin = c.window > 0 ? std::max<int64_t>(0, L - n + first - c.window + 1) : 0;
        begin = begin / TILE * TILE;
        const bool split = count * G <= ROWS / 2 && end - begin > SPLIT;
        for (int h = 0; h < c.kv_heads; h++) {
          Tile tile{s, h, first, count, 0, at};
          int from = begin;
          do {
            const int to = split ? std::min(end, (from / SPLIT + 1) * SPLIT) : end;
            items.push_back({s, h, first, count, from, to, at});
            at += (int64_t)count * G * (SV + 2);
            tile.splits++;
            from = to;
          } while (from < end);
          tiles.push_back(tile);
        }
      }
    }
    total = at;
  }
};

std::vector<int> permutation(int D) {  // slot -> element, D for padding
  std::vector<int> p(padded(D));
  for (int v = 0; v < padded(D) / 64; v++)
    for (int i = 0; i < 8; i++)
      for (int l = 0; l < 8; l++) p[64 * v + 8 * i + l] = element(D, v, i, l);
  return p;
}

}  // namespace ff
