"""Tokens that fit into a KV budget, per mode, counted as the engine allots them: in whole blocks.

vLLM divides the budget by the bytes of one block over all layers and rounds down (``get_kv_cache_config_from_groups``
in vLLM 0.32.0).  Bytes of its own modes, per token and KV head, from the same source:

* 16 bits: ``2 (D + Dv)``; ``fp8``: ``D + Dv``;
* ``int4_per_token_head``: ``D/2 + Dv/2`` and two float32 scales, 8 bytes;
* ``turboquant_4bit_nc``: ``D/2`` and a float16 norm for the key, ``D/2`` and two float16 numbers for the value,
  rounded up to an even number; the first and last two layers stay at 16 bits.

Bytes of Fourfold's pages come from ``PageLayout`` and nowhere else.
"""

from __future__ import annotations

import math
from typing import Any

from fourfold.bench.model_config import ModelShape
from fourfold.errors import FourfoldError
from fourfold.layout import PageLayout
from fourfold.modes import MODES

TURBOQUANT_EXACT_LAYERS = 2
"""Layers at either end that vLLM's TurboQuant keeps at 16 bits."""
_MLA = "multi-head latent attention keeps one latent vector a token, not keys and values"


class Unavailable(Exception):
    """A mode cannot hold this model; the text says why."""


def capacity(shape: ModelShape, memory: int, block_size: int, tensor_parallel: int = 1) -> dict[str, Any]:
    """Tokens per mode in ``memory`` bytes of KV cache on one rank.

    Returns:
        ``{"modes": {name: {"tokens", "bytes_per_token"}}, …}``; a mode that is not available has both as
        ``None`` and a ``reason``.  ``bytes_per_token`` is over all layers of one rank.
    """
    heads = shape.kv_heads_per_rank(tensor_parallel)
    modes: dict[str, Any] = {}
    for name in MODES:
        try:
            modes[name] = _one(name, shape, heads, memory, block_size)
        except (Unavailable, FourfoldError) as error:
            why = error.why or error.what if isinstance(error, FourfoldError) else str(error)
            what = error.what if isinstance(error, FourfoldError) else ""
            reason = f"{what}: {why}" if what and what != why else why
            modes[name] = {"tokens": None, "bytes_per_token": None, "reason": reason}
    note = ""
    if shape.sliding_layers and shape.sliding_layers < shape.layers:
        note = (
            f"{shape.sliding_layers} of {shape.layers} layers drop what is outside {shape.window} tokens; "
            "the numbers hold for contexts up to that window, longer ones need less"
        )
    return {
        "modes": modes,
        "memory_bytes": memory,
        "block_size": block_size,
        "tensor_parallel_size": tensor_parallel,
        "note": note,
    }


def layer_bytes(name: str, shape: ModelShape, heads: int, block_size: int) -> list[int]:
    """Bytes of one token in each layer, on one rank.

    Raises:
        Unavailable: the mode cannot hold this model.
        FourfoldError: ``PageLayout`` refuses the shape.
    """
    if shape.unsupported:
        raise Unavailable(shape.unsupported)
    if shape.latent:
        if name == "bf16":
            return [2 * shape.latent] * shape.layers
        raise Unavailable(_MLA)
    both = shape.head_size + shape.head_size_v
    if name == "bf16":
        return [2 * both * heads] * shape.layers
    if name == "fp8":
        return [both * heads] * shape.layers
    if name == "int4_per_token_head":
        if shape.head_size < 32:
            raise Unavailable(f"vLLM's Triton backend takes head sizes from 32, not {shape.head_size}")
        return [(shape.head_size // 2 + shape.head_size_v // 2 + 8) * heads] * shape.layers
    if name == "turboquant_4bit_nc":
        if shape.head_size != shape.head_size_v:
            raise Unavailable("vLLM's TurboQuant sizes the value like the key")
        if 0 < shape.sliding_layers < shape.layers:
            raise Unavailable("vLLM pads mixed pages to the largest where full and sliding-window layers alternate")
        slot = 2 * math.ceil(shape.head_size / 2) + 6
        exact = min(TURBOQUANT_EXACT_LAYERS, shape.layers // 2)
        ends, middle = [2 * both * heads] * exact, [(slot + slot % 2) * heads] * (shape.layers - 2 * exact)
        return ends + middle + ends
    page = PageLayout(block_size, heads, shape.head_size, shape.head_size_v)
    return [page.bytes_per_token] * shape.layers


def _one(name: str, shape: ModelShape, heads: int, memory: int, block_size: int) -> dict[str, Any]:
    per_layer = layer_bytes(name, shape, heads, block_size)
    slots, groups = _grouping(shape)
    # Alternating layers are split into groups of `slots` layers; a token takes a block in every group, and the
    # last group may hold empty places.  One group of all layers is the ordinary case.
    per_token = sum(per_layer) if groups == 1 else slots * groups * per_layer[0]
    blocks = memory // ((per_token // groups) * block_size) // groups
    return {"tokens": blocks * block_size, "bytes_per_token": per_token}


def _grouping(shape: ModelShape) -> tuple[int, int]:
    """Layers per group and groups, by vLLM's rule for models that mix full and sliding-window layers."""
    sliding, full = shape.sliding_layers, shape.layers - shape.sliding_layers
    if not sliding or not full:
        return shape.layers, 1
    small, large = min(sliding, full), max(sliding, full)
    slots = large if large < 1.5 * small else small
    return slots, math.ceil(sliding / slots) + math.ceil(full / slots)
