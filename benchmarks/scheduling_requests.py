"""The requests of ``gpu_scheduling.py``: held-out ShareGPT conversations with the lengths that they really have.

    python benchmarks/scheduling_requests.py build/scheduling

Writes FOLDER/requests.json, [{"prompt_token_ids", "output_tokens"}, …] in the order of the load, and the tokenizer
that made them, which the engine needs: the ranked scheduler ranks text.  Prompts are first turns under the chat
template of SmolLM2; an answer's length is that of the conversation's own answer.  Held out: the embedded ranker was
trained on none of these prompts and on no piece of their conversations (``fourfold.rank.corpora.split``).  Left out:
prompts of more than 2,048 tokens, answers of more than 1,024.  Prints what the load is like, and the embedded ranker's
tau on it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from fourfold.bench.models import default_model
from fourfold.bench.prompts import Prompt, find_sharegpt, read_sharegpt, select
from fourfold.bench.tokenizer import encoder, load_tokenizer, renderer
from fourfold.config import Settings
from fourfold.files import write_text
from fourfold.rank.corpora import HELD_OUT, prompt_hash
from fourfold.rank.metrics import kendall_tau
from fourfold.rank.ngram import NgramRanker
from fourfold.vllm_plugin.prompt_text import PromptText

MAX_PROMPT, MAX_ANSWER = 2048, 1024


def held_out() -> list[Prompt]:
    """First turns that no training run of this package sees, each prompt once."""
    unique = {p.text: p for p in read_sharegpt(find_sharegpt()) if prompt_hash(p.text) < HELD_OUT}
    return list(unique.values())


def read_requests(folder: Path) -> tuple[list[tuple[int, int]], list[str]]:
    """Lengths (prompt, answer) and the texts that the scheduler's ranker sees, of a rendered folder."""
    rows: list[dict[str, Any]] = json.loads((folder / "requests.json").read_text())
    text = PromptText(load_tokenizer(str(folder)))
    lengths = [(len(row["prompt_token_ids"]), row["output_tokens"]) for row in rows]
    return lengths, [text(row["prompt_token_ids"]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--tokenizer", help="a model's directory [the demo's SmolLM2]")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer or str(default_model(Settings.from_env().cache_dir)))
    encode = encoder(tokenizer)
    everything = held_out()
    sized = [Prompt(p.text, output_tokens=len(encode(p.answer))) for p in everything]
    fitting = [p for p in sized if 0 < (p.output_tokens or 0) <= MAX_ANSWER]
    chosen = select(
        fitting, options.requests, encode, renderer(tokenizer), max_model_len=MAX_PROMPT + MAX_ANSWER,
        seed=options.seed, max_prompt_tokens=MAX_PROMPT,
    )  # fmt: skip
    rows = [{"prompt_token_ids": encode(r.prompt), "output_tokens": r.output_tokens} for r in chosen]
    tokenizer.save_pretrained(options.folder)
    write_text(options.folder / "requests.json", json.dumps(rows, separators=(",", ":")))
    lengths, texts = read_requests(options.folder)
    answers = [answer for _, answer in lengths]
    tau = kendall_tau(NgramRanker.load().score(texts), answers)
    size = (options.folder / "requests.json").stat().st_size / 2**20
    prompt, answer = statistics.mean(p for p, _ in lengths), statistics.mean(answers)
    print(
        f"{len(rows):,} of {len(everything):,} held-out first turns, of which {len(everything) - len(fitting)} have an "
        f"answer of more than {MAX_ANSWER:,} tokens or none; on average {prompt:.0f} prompt and {answer:.0f} answer "
        f"tokens; tau of the embedded ranker {tau:.3f}; {size:.1f} MiB"
    )


if __name__ == "__main__":
    main()
