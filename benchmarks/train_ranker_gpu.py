"""Fine-tune a transformer ranker on a GPU host that has only torch and transformers.

    PYTHONPATH=src python benchmarks/train_ranker_gpu.py sharegpt.jsonl MODEL_DIR --output ranker/

The JSONL is that of ``tools/ranker_data.py``.  Prints held-out tau with its interval as JSON and saves the ranker
(checkpoint in bf16, tokenizer, length map).  The defaults take about four minutes for 135M
parameters on one H200 (--seconds ends training).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from fourfold.rank.corpora import Example
from fourfold.rank.transformer_training import TransformerOptions, train_transformer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in (("rate", 5e-5), ("head-rate", 5e-4), ("seconds", 200.0), ("later-turns", 1.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    for name, default in (("epochs", 3), ("list-size", 64), ("max-tokens", 256), ("seed", 0), ("limit", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    parts: dict[str, list[Example]] = {"train": [], "valid": [], "held": []}
    with arguments.data.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            parts[row["split"]].append(Example(row["prompt"], row["length"], row["turn"]))
    if arguments.limit:
        parts = {name: rows[: arguments.limit] for name, rows in parts.items()}
    torch.backends.cuda.matmul.allow_tf32 = True
    options = TransformerOptions(
        list_size=arguments.list_size,
        rate=arguments.rate,
        head_rate=arguments.head_rate,
        later_turns=arguments.later_turns,
        epochs=arguments.epochs,
        seconds=arguments.seconds,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
    )
    began = time.monotonic()
    ranker, report = train_transformer(
        arguments.model,
        parts["train"],
        parts["valid"],
        parts["held"],
        options,
        device=arguments.device,
        source=arguments.data.name,
        progress=lambda step, steps, said: print(
            f"{time.monotonic() - began:6.1f} s  {step}/{steps}  {said}", file=sys.stderr, flush=True
        ),
    )
    result = {
        "model": arguments.model.name,
        "tau": round(report.tau, 4),
        "tau_interval": [round(bound, 4) for bound in report.interval],
        "prompts": report.prompts,
        "mean_absolute_error_tokens": round(report.mean_absolute_error, 1),
        "seconds": round(time.monotonic() - began, 1),
        "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else arguments.device,
    }
    if arguments.output:
        ranker.encoder.model.to(torch.bfloat16)
        ranker.save(arguments.output)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
