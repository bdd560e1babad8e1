"""What rounding to fp8 and to 4-bit pages does to a real model's keys, layer by layer, seen through its queries.

    python benchmarks/key_bias.py MODEL_DIR --text wikitext2/test.txt --out results/key-bias

Some models (Qwen2) add a bias to their keys that is far larger than what the keys say.  fp8 keeps four significant bits
of the sum, whatever its scale; Fourfold takes the mean away first.  The error of a key k is measured as the queries see
it, sqrt(E[(q·error)²] / E[(q·(k − mean))²]): the mean shifts all scores of a query alike, so softmax does not see it.
Calibrated on the first windows of the text, measured on the next; keys after RoPE, position 0 left out; a CPU will do.
Writes DIR/metrics.json: {"layers": [{"layer", "key_rms", "key_spread", "fp8_error", "fourfold_error"}], …}.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fourfold.bench.record import record
from fourfold.quant import codec
from fourfold.quant.calibration import Statistics
from fourfold.quant.params import LayerParams

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""query [T, H, D], key and value [T, HK, D] of one sequence and layer, float32."""


class Capture:
    """Queries, keys and values of the last forward pass, by layer."""

    def __init__(self, folder: Path) -> None:
        self.layers: dict[int, Heads] = {}
        AttentionInterface.register("fourfold-capture", self._attend)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="fourfold-capture", dtype=torch.bfloat16
        ).eval()

    def _attend(self, module: Any, *arguments: Any, **more: Any) -> Any:
        query, key, value = (x[0].transpose(0, 1).float() for x in arguments[:3])
        self.layers[module.layer_idx] = (query, key, value)
        return sdpa_attention_forward(module, *arguments, **more)

    def __call__(self, window: torch.Tensor) -> dict[int, Heads]:
        with torch.inference_mode():
            self.model(window[None])
        return self.layers


def row_of(layer: int, heads: Heads, params: LayerParams) -> dict[str, float]:
    """Errors of one layer's keys."""
    key = heads[1][1:]
    exact = codec.transform_key(key, params)

    def seen(x: torch.Tensor) -> float:
        return torch.einsum("thd,hed->the", x, params.query_factor).square().sum().item()

    fp8 = codec.transform_key(key.to(torch.float8_e4m3fn).float(), params) - exact
    four = codec.dequantise(*codec.quantise(exact, params)) - exact
    return {
        "layer": layer, "key_rms": key.square().mean().sqrt().item(),
        "key_spread": (key - key.mean(0)).square().mean().sqrt().item(),
        "fp8_error": math.sqrt(seen(fp8) / seen(exact)), "fourfold_error": math.sqrt(seen(four) / seen(exact)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text")
    parser.add_argument("--windows", type=int, default=4, help="for the calibration")
    parser.add_argument("--window-tokens", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("results/key-bias"))
    options = parser.parse_args()
    needed = (options.windows + 1) * options.window_tokens
    text = options.text.read_text(encoding="utf-8")[: 16 * needed]
    tokens = AutoTokenizer.from_pretrained(options.model)(text, return_tensors="pt").input_ids[0][:needed]
    if tokens.numel() < needed:
        parser.error(f"{options.text} has {tokens.numel()} tokens and {needed} are needed")
    capture = Capture(options.model)
    *calibrating, measured = tokens.split(options.window_tokens)
    statistics: dict[int, Statistics] = {}
    for window in calibrating:
        for layer, (query, key, value) in capture(window).items():
            empty = Statistics.empty(key.shape[1], key.shape[2], value.shape[2])
            statistics.setdefault(layer, empty).add(query, key, value)
    rows = [row_of(layer, heads, statistics[layer].params()) for layer, heads in sorted(capture(measured).items())]
    for row in rows:
        print("  ".join(f"{name} {value:.3g}" for name, value in row.items()))
    result = {"model": options.model.resolve().name, "layers": rows, "tokens": options.window_tokens}
    print(record(options.out.parent, options.out.name, result, command=["python", *sys.argv]))


if __name__ == "__main__":
    main()
