"""The oracle: attention over 4-bit pages in float64 NumPy, read off the bytes with nothing shared with the kernels.

It knows the page only through the documented format (module docstring of ``fourfold.layout``) and imports neither the
codec nor any kernel.  Slow on purpose.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def read_page(page: npt.NDArray[np.uint8], block_size: int, head_size: int, head_size_v: int) -> tuple[Array, Array]:
    """Transformed keys [block_size, D] and values [block_size, Dv] of one head's page (1-D bytes)."""
    k_end = block_size * head_size // 2
    v_end = k_end + block_size * head_size_v // 2
    scales = page[v_end:].copy().view(np.float16).astype(np.float64)

    def rows(codes: npt.NDArray[np.uint8], size: int, scale: Array) -> Array:
        out = np.empty((block_size, size))
        codes = codes.reshape(block_size, size // 2)
        out[:, : size // 2] = (codes % 16) - 7.5
        out[:, size // 2 :] = (codes // 16) - 7.5
        return out * scale[:, None]

    keys = rows(page[:k_end], head_size, scales[:block_size])
    values = rows(page[k_end:v_end], head_size_v, scales[block_size : 2 * block_size])
    return keys, values


def attend(
    query: Array,
    cache: npt.NDArray[np.uint8],
    block_table: list[int],
    length: int,
    *,
    block_size: int,
    scale: float,
    query_matrix: Array,
    value_inverse: Array,
    value_centre: Array,
    sink_key: Array,
    sink_value: Array,
    soft_cap: float = 0.0,
    window: int = 0,
    causal: bool = True,
    own: tuple[Array, Array] | None = None,
) -> Array:
    """Outputs [n, H, Dv] of the last ``n`` tokens of one sequence.

    Args:
        query: [n, H, D] untransformed.
        cache: [pages, HK, bytes] uint8.
        block_table: pages of the sequence; length: tokens, the n new ones included.
        query_matrix: [HK, D, D]; value_inverse: [Dv, Dv]; value_centre, sink_key, sink_value: [HK, D or Dv].
        own: transformed keys [n, HK, D] and values [n, HK, Dv] that replace the codes of the n new tokens.
    """
    n, heads, head_size = query.shape
    kv_heads = cache.shape[1]
    head_size_v = value_inverse.shape[0]
    out = np.zeros((n, heads, head_size_v))
    for head in range(heads):
        kv = head // (heads // kv_heads)
        keys = np.zeros((length, head_size))
        values = np.zeros((length, head_size_v))
        for first in range(0, length, block_size):
            page = cache[block_table[first // block_size], kv]
            page_keys, page_values = read_page(page, block_size, head_size, head_size_v)
            keep = min(block_size, length - first)
            keys[first : first + keep], values[first : first + keep] = page_keys[:keep], page_values[:keep]
        if length:
            keys[0] += sink_key[kv]
            values[0] += sink_value[kv]
        if own is not None:
            keys[length - n :] = own[0][:, kv]
            values[length - n :] = own[1][:, kv]
        for i in range(n):
            position = length - n + i
            first = max(0, position - window + 1) if window else 0
            last = position + 1 if causal else length
            if last <= first:
                continue
            scores = keys[first:last] @ (query[i, head] @ query_matrix[kv]) * scale
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max())
            weights /= math.fsum(weights)
            out[i, head] = (weights @ values[first:last]) @ value_inverse + value_centre[kv]
    return out
