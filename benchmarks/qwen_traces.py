"""A trace of a model's own answers to ShareGPT prompts, for ``fourfold ranker train`` and ``evaluate``.

    python benchmarks/qwen_traces.py render prompts.json --tokenizer QWEN_DIR      # where ShareGPT is installed
    python benchmarks/qwen_traces.py answer prompts.json QWEN_DIR trace.jsonl      # on a GPU, vLLM with bf16 KV
    fourfold ranker train --data trace.jsonl --output mine.safetensors
    fourfold ranker evaluate default mine.safetensors --data trace.jsonl --json

The prompts are first turns under the model's chat template, a random part of all.  Training and evaluation split them
by hash as ever, so the embedded ranker saw none of those that it is judged on either.  Answers are sampled at
temperature 0.7 and cut at 1,024 tokens; those that were cut stay in the trace as such, and no command ranks them.  The
trace holds the prompts' text, which is public.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from fourfold.bench.prompts import find_sharegpt, read_sharegpt, select
from fourfold.bench.tokenizer import encoder, load_tokenizer, renderer
from fourfold.files import write_text
from fourfold.rank.trace import TraceWriter

MAX_PROMPT, MAX_ANSWER = 2048, 1024


def render(options: argparse.Namespace) -> None:
    """Write [{"prompt": text, "prompt_token_ids": [int, …]}, …]."""
    tokenizer = load_tokenizer(options.tokenizer)
    encode, chat = encoder(tokenizer), renderer(tokenizer)
    by_text = {chat(p.text): p for p in read_sharegpt(find_sharegpt())}
    chosen = select(
        list(by_text.values()), options.requests, encode, chat, max_model_len=MAX_PROMPT + MAX_ANSWER,
        seed=options.seed, max_prompt_tokens=MAX_PROMPT,
    )  # fmt: skip
    rows = [{"prompt": by_text[r.prompt].text, "prompt_token_ids": encode(r.prompt)} for r in chosen]
    write_text(options.prompts, json.dumps(rows, separators=(",", ":")))
    print(f"{len(rows):,} of {len(by_text):,} prompts, {options.prompts.stat().st_size / 2**20:.1f} MiB")


def answer(options: argparse.Namespace) -> None:
    """Sample an answer to every prompt and write the trace."""
    from vllm import LLM, SamplingParams

    rows = json.loads(options.prompts.read_text())[: options.requests]
    engine = {"max_model_len": MAX_PROMPT + MAX_ANSWER, "dtype": "bfloat16", "seed": options.seed, **options.engine}
    model = LLM(str(options.model), **engine)
    began = time.perf_counter()
    outputs = model.generate(
        [{"prompt_token_ids": row["prompt_token_ids"]} for row in rows],
        SamplingParams(temperature=0.7, max_tokens=MAX_ANSWER, detokenize=False),
    )
    took = time.perf_counter() - began
    options.trace.unlink(missing_ok=True)
    tokens = cut = 0
    with TraceWriter(options.trace, with_prompts=True) as trace:
        for row, output in zip(rows, outputs, strict=True):
            ids, finish = output.outputs[0].token_ids, str(output.outputs[0].finish_reason)
            tokens, cut = tokens + len(ids), cut + (finish == "length")
            trace.write(
                row["prompt"], prompt_tokens=len(row["prompt_token_ids"]), output_tokens=len(ids), finish=finish
            )
    size = options.trace.stat().st_size / 2**20
    print(
        f"{len(rows):,} answers, {tokens / len(rows):.0f} tokens on average, {cut} cut at {MAX_ANSWER:,}; "
        f"{tokens / took:,.0f} tokens/s, {took:.0f} s; trace of {size:.1f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    commands = parser.add_subparsers(required=True)
    rendering = commands.add_parser("render", help="choose the prompts")
    rendering.add_argument("prompts", type=Path)
    rendering.add_argument("--tokenizer", required=True, help="the model's directory")
    rendering.set_defaults(run=render)
    answering = commands.add_parser("answer", help="serve them")
    answering.add_argument("prompts", type=Path)
    answering.add_argument("model", type=Path)
    answering.add_argument("trace", type=Path)
    answering.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as JSON")
    answering.set_defaults(run=answer)
    for command in (rendering, answering):
        command.add_argument("--requests", type=int, default=3000)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
