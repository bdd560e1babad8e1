"""Decode attention on one GPU: 4-bit pages against FlashAttention-3 on bf16 and fp8 pages and vLLM's own 4-bit kernels.

    python benchmarks/gpu_decode.py --out results/gpu_decode/metrics.json [--quick]

Every kernel is checked against float64 on the same bytes before it is timed.  Times are medians of CUDA graph replays
over input sets that exceed the L2 cache, in µs; they cover everything from queries to outputs (for Fourfold: query
transform, split attention, merge and output rotation), and leave out what runs once a step for all layers (plan, FA3's
scheduler metadata).  Kernels that this machine lacks (no vLLM) are left out of the rows and named at the end.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from fourfold.files import write_json
from fourfold.kernels.cuda.decode import Decode
from fourfold.kernels.cuda.pack import pack_params
from fourfold.kernels.cuda.store import store
from gpu_inputs import Pages, Shape, random_params, reference
from gpu_rivals import RIVALS, unavailable
from gpu_timing import copy_bandwidth, error, graph_us

TOLERANCE = 0.01
"""Largest relative error; bf16 outputs alone give 0.0017."""


def shapes(quick: bool) -> list[Shape]:
    """The design's shapes, the grid of batch and context, and other head counts."""
    named = [Shape(32, 4096), Shape(64, 2048), Shape(128, 2048), Shape(1, 65536)]
    if quick:
        return named
    grid = [Shape(b, n) for b in (1, 8, 32, 128) for n in (512, 1024, 4096, 16384)]
    others = [
        Shape(b, n, heads=h, kv_heads=k) for h, k in ((12, 2), (8, 1)) for b in (1, 32, 128) for n in (1024, 4096)
    ]
    small = [Shape(b, n, head_size=64) for b in (1, 32, 128) for n in (1024, 4096)]
    drafts = [Shape(32, 4096, drafts=d) for d in (1, 3, 5)]
    return named + [s for s in grid if s not in named] + others + small + drafts


def time_fourfold(shape: Shape, pages: Pages, device: torch.device) -> tuple[float, float]:
    """(relative error, µs)."""
    params = random_params(shape, device)
    packed = pack_params(params, torch.bfloat16, device)
    scale = shape.head_size**-0.5
    decode = Decode(shape.layout, shape.heads, scale=scale, dtype=torch.bfloat16, device=device)
    cut = decode.cut(shape.batch, len(pages.query), 1 + shape.drafts)
    plan = decode.plan(pages.lengths, pages.query_start, cut)
    out = torch.full_like(pages.query, float("nan"))
    scratch = torch.empty(decode.scratch_bytes(cut), dtype=torch.uint8, device=device)
    calls = [lambda t=t: decode(pages.query, pages.cache, t, plan, packed, out, scratch) for t in pages.tables]  # type: ignore[misc]
    calls[0]()
    n = 1 + shape.drafts
    checked = {0, shape.batch // 2, shape.batch - 1}
    worst = max(
        error(out[b * n : (b + 1) * n], reference(pages, shape, b, pages.tables[0], params, scale)) for b in checked
    )
    return worst, graph_us(calls)


def row_of(shape: Shape, bandwidth: float, device: torch.device) -> dict[str, object]:
    """One line of the table: µs of every kernel present, floors, ratios to FA3."""
    us: dict[str, float] = {}
    errors: dict[str, float] = {}
    pages = Pages(shape, device)
    errors["fourfold"], us["fourfold"] = time_fourfold(shape, pages, device)
    del pages
    for name, rival in RIVALS.items():
        if unavailable(name) is None and not (name == "turboquant_4bit_nc" and shape.drafts):
            torch.cuda.empty_cache()
            try:
                errors[name], us[name] = rival(shape, device)
            except (RuntimeError, TypeError) as problem:  # another vLLM's kernels are not ours to mend: no number
                print(f"{name} failed at {shape}: {problem}", file=sys.stderr)
    for name, value in errors.items():
        limit = TOLERANCE if name in ("fourfold", "fa3_bf16") else 0.5  # the others quantise their own cache
        if not value <= limit:
            sys.exit(f"{name} is wrong at {shape}: relative error {value}")
    floor = {"4bit": shape.bytes_4bit / bandwidth * 1e6, "bf16": shape.bytes_bf16 / bandwidth * 1e6}
    base = us.get("fa3_bf16")
    ratio = {"fourfold_to_floor": us["fourfold"] / floor["4bit"]}
    if base is not None:
        ratio |= {name: base / value for name, value in us.items()}
    return {
        "batch": shape.batch, "context": shape.context, "heads": shape.heads, "kv_heads": shape.kv_heads,
        "head_size": shape.head_size, "block_size": shape.block_size, "drafts": shape.drafts,
        "us": us, "floor_us": floor, "ratio": ratio, "error": errors,
    }  # fmt: skip


def store_rows(bandwidth: float, device: torch.device) -> list[dict[str, float]]:
    """µs of quantise-and-store and the byte floor: plain, as for a model without a calibration, and in the metric of
    the queries with a centre of its own for position 0, as calibration makes it.

    Up to 128 tokens are decodes, each in a page of its own; more are a prompt from position 0 in whole pages."""
    rows = []
    shape = Shape(1, 1024)
    layout = shape.layout
    cache = torch.zeros(1024, layout.num_kv_heads, layout.head_page_bytes, dtype=torch.uint8, device=device)
    for tokens in (1, 32, 128, 2048, 8192):
        decodes = tokens <= 128
        sets = []
        for _ in range(max(1, min(16, (400 << 20) // (tokens * 8 * 128 * 4)))):
            key, value = (torch.randn(tokens, 8, 128, device=device).bfloat16() for _ in range(2))
            page, slot = torch.randperm(1024, device=device), torch.arange(tokens, device=device)
            if decodes:
                slots = page[:tokens] * layout.block_size + torch.randint(layout.block_size, (tokens,), device=device)
            else:
                slots = page[slot // layout.block_size] * layout.block_size + slot % layout.block_size
            sets.append((key, value, slots))
        positions = torch.arange(tokens, device=device) + (1000 if decodes else 0)
        row = {"tokens": float(tokens), "floor_us": tokens * 8 * (512 + layout.bytes_per_token_head) / bandwidth * 1e6}
        for name, metric in (("us_plain", False), ("us_metric", True)):
            packed = pack_params(random_params(shape, device, sink=metric, metric=metric), torch.bfloat16, device)
            row[name] = graph_us(
                [lambda s=s, p=packed, at=positions: store(s[0], s[1], cache, s[2], at, layout, p) for s in sets]  # type: ignore[misc]
            )
        rows.append(row)
    return rows


def step_rows(device: torch.device) -> list[dict[str, float]]:
    """µs of one layer of a serving step, store and attention: 320 decodes of 100 to 760 tokens, alone and beside a
    prompt of 181 tokens (ShareGPT's means at 64 requests a second)."""
    decodes, prompt = 320, 181
    shape = Shape(decodes + 1, 768)
    pages = Pages(shape, device, cold=1200 << 20)
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(100, 761, (decodes + 1,), generator=generator)
    lengths[-1] = prompt
    params = random_params(shape, device)
    packed = pack_params(params, torch.bfloat16, device)
    scale = shape.head_size**-0.5
    decode = Decode(shape.layout, shape.heads, scale=scale, dtype=torch.bfloat16, device=device)
    rows = []
    for chunk in (0, prompt):
        batch, tokens = decodes + (chunk > 0), decodes + chunk
        start = torch.tensor([*range(decodes + 1), *([tokens] if chunk else [])], dtype=torch.int32, device=device)
        cut = decode.cut(batch, tokens, 1) if not chunk else decode.cut(batch, tokens, usual=1)
        plan = decode.plan(lengths[:batch].int().to(device), start, cut)
        pages.query = torch.randn(tokens, shape.heads, shape.head_size, device=device).bfloat16()
        out = torch.full_like(pages.query, float("nan"))
        scratch = torch.empty(decode.scratch_bytes(cut), dtype=torch.uint8, device=device)
        decode(pages.query, pages.cache, pages.tables[0], plan, packed, out, scratch)
        for b in (0, decodes - 1):
            truth = reference(pages, shape, b, pages.tables[0], params, scale, length=int(lengths[b]))
            if not (worst := error(out[b : b + 1], truth)) <= TOLERANCE:
                sys.exit(f"fourfold is wrong in a step: relative error {worst}")
        key, value = (torch.randn(tokens, 8, 128, device=device).bfloat16() for _ in range(2))
        slots = torch.randperm(pages.cache.shape[0] * shape.block_size, device=device)[:tokens].clone()
        at = torch.arange(tokens, device=device)

        def layer(table: torch.Tensor) -> None:
            store(key, value, pages.cache, slots, at, shape.layout, packed)  # noqa: B023
            decode(pages.query, pages.cache, table, plan, packed, out, scratch, after_store=True)  # noqa: B023

        us = graph_us([lambda t=t: layer(t) for t in pages.tables])  # type: ignore[misc]
        rows.append({"decodes": decodes, "prompt": chunk, "us": us, "stages": cut.tiling.stages})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="the four main shapes only")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_decode needs a CUDA device")
    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s")
    names = ["fourfold", *(n for n in RIVALS if unavailable(n) is None)]
    print(f"{'batch × context  heads  D  drafts':36}{'floor':>8}" + "".join(f"{n:>20}" for n in names) + "   ratio")
    rows = []
    for shape in shapes(options.quick):
        row = row_of(shape, bandwidth, device)
        rows.append(row)
        us, ratio = row["us"], row["ratio"]
        label = f"{shape.batch} × {shape.context}  {shape.heads}/{shape.kv_heads}  {shape.head_size}  {shape.drafts}"
        times = "".join(f"{us[n]:20.1f}" if n in us else f"{'-':>20}" for n in names)  # type: ignore[index,operator]
        print(f"{label:36}{row['floor_us']['4bit']:8.1f}{times}   {ratio.get('fourfold', 0):.2f}", flush=True)  # type: ignore[index,union-attr]
    stores = store_rows(bandwidth, device)
    for line in stores:
        print("store", {k: round(v, 2) for k, v in line.items()})
    steps = step_rows(device)
    for line in steps:
        print("layer of a step", {k: round(v, 2) for k, v in line.items()})
    missing = {name: why for name in RIVALS if (why := unavailable(name)) is not None}
    for name, why in missing.items():
        print(f"not timed: {name} ({why})")
    write_json(
        options.out,
        {
            "device": torch.cuda.get_device_name(),
            "copy_bytes_per_s": bandwidth,
            "rows": rows,
            "store": stores,
            "step": steps,
            "missing": missing,
        },
    )


if __name__ == "__main__":
    main()
