"""Write the ShareGPT prompts and answer lengths for training elsewhere: one JSONL of under 20 MB.

    python tools/ranker_data.py sharegpt.jsonl [--tokenizer tokenizer.json]

Each line: ``{"prompt", "length", "split": "train" | "valid" | "held", "turn": 0 | 1}``.  Prompts are cut to what a
ranker reads (the first 900 and the last 300 characters); with a tokenizer.json, lengths are its tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fourfold.files import write_text
from fourfold.rank import corpora
from fourfold.rank.training import load_split

HEAD, TAIL = 900, 300


def cut(prompt: str) -> str:
    return prompt if len(prompt) <= HEAD + TAIL else f"{prompt[:HEAD]}\n…\n{prompt[-TAIL:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json that counts the answers")
    arguments = parser.parse_args()
    if arguments.tokenizer:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
        corpora.approximate_tokens = lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
    parts = load_split(None)
    lines = [
        json.dumps(
            {"prompt": cut(e.prompt), "length": e.length, "split": name, "turn": min(e.turn, 1)}, ensure_ascii=False
        )
        for name, rows in (("train", parts.train), ("valid", parts.valid), ("held", parts.held))
        for e in rows
    ]
    # a lone surrogate cannot be written as UTF-8
    text = ("\n".join(lines) + "\n").encode("utf-8", "replace").decode("utf-8")
    write_text(arguments.output, text)
    print(f"{len(lines):,} prompts, {arguments.output.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
