"""What KV modes cost in quality on a GPU, through vLLM's engine: KL and perplexity on a text, and GSM8K.

Three steps, because lm-evaluation-harness and the GPU are rarely on one machine:

    python benchmarks/gpu_quality.py render --model DIR --gsm8k test.jsonl --text wikitext2/test.txt --out inputs.json
    python benchmarks/gpu_quality.py run inputs.json --model DIR --modes bf16,fp8,fourfold --gpu 0 --out OUT
    python benchmarks/gpu_quality.py score OUT… --gsm8k test.jsonl

`run` needs vLLM only.  It takes one GPU and starts an engine for every mode and task, each in a process of its own; it
writes OUT/kl.json, OUT/answers.json (rewritten after every mode) and OUT/engine.log, and exits with 1 if a mode failed.
`score` merges the folders into results/kl-gpu and results/gsm8k-gpu.  turboquant_4bit_nc_every_layer is
turboquant_4bit_nc without the four layers that vLLM leaves in 16 bits.

Windows go through in chunks: TurboQuant reads the tokens of a prompt's first chunk unquantised, and whole windows would
measure nothing.  Fourfold's text does not depend on chunking.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fourfold.bench.record import commit, environment, record
from fourfold.config import Settings
from fourfold.errors import FourfoldError
from fourfold.evals import gsm8k, perplexity
from fourfold.evals.process import run_job
from fourfold.files import write_json
from fourfold.modes import MODES, KvMode, parse_modes
from fourfold.modes import environment as mode_environment

EVERY_LAYER = replace(MODES["turboquant_4bit_nc"], name="turboquant_4bit_nc_every_layer")
KNOWN = {**MODES, EVERY_LAYER.name: EVERY_LAYER}
GENERATE = "fourfold.evals.generate"
DIVERGENCE = "fourfold.evals.worker"

SHARED = {"gpu_memory_utilization": 0.3}
"""vLLM refuses to start where less than this share is free; the cache's size is given, and engines share a card."""


def command(mode: KvMode, module: str) -> tuple[str, ...]:
    """What runs a module's job in this mode."""
    if mode is EVERY_LAYER:
        return str(Path(__file__).with_name("turboquant_every_layer.py")), module
    return "-m", module


def render(options: argparse.Namespace) -> None:
    """Write prompts and windows; the model's folder is needed for its tokenizer."""
    from fourfold.bench.tokenizer import load_tokenizer
    from fourfold.evals.windows import cut_windows, read_text

    tokenizer, text = load_tokenizer(str(options.model)), read_text(options.text)
    questions = gsm8k.read_questions(options.gsm8k)[: options.questions]
    inputs = {
        "gsm8k": gsm8k.render(questions),
        "windows": cut_windows(tokenizer, text, options.windows, options.window_tokens),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(inputs), encoding="utf-8")  # 16,000 token ids, indented, would be 16,000 lines
    print(f"{len(questions)} prompts, {options.windows} windows, {options.out.stat().st_size / 1e6:.1f} MB")


class Run:
    """The modes of one process, one task after another."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.model = str(options.model)
        self.inputs = json.loads(options.inputs.read_text(encoding="utf-8"))
        self.failed = 0

    def environment(self, mode: KvMode) -> dict[str, str]:
        """Of the engine: the plugin's switch, and the GPU."""
        gpu = self.options.gpu
        return {**mode_environment(mode, Settings.from_env()), **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}

    def attempt(self, mode: KvMode, task: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """One engine; its log is kept, and if it failed the end is printed and the result is None."""
        try:
            return work()
        except FourfoldError as error:
            self.failed += 1
            log = self.folder / f"{mode.name}.log"
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
            print(f"{mode.name:>30} {task} FAILED: {error}", *lines[-20:], sep="\n", flush=True)
            return None
        finally:
            log = self.folder / f"{mode.name}.log"
            if log.exists():
                with (self.options.out / "engine.log").open("a", encoding="utf-8") as sink:
                    sink.write(f"=== {mode.name} {task}\n{log.read_text(encoding='utf-8', errors='replace')}")

    def write(self, name: str, result: dict[str, Any]) -> None:
        """A file of OUT, with what made it and where."""
        words = ["python", "benchmarks/gpu_quality.py", *sys.argv[1:]]
        write_json(self.options.out / name, {**result, "command": words, "environment": environment()})

    def kl(self, modes: list[KvMode]) -> None:
        """Perplexity, KL and agreement; the baseline runs first, whatever the modes are."""
        windows: list[list[int]] = self.inputs["windows"][: self.options.limit]
        chunk = self.options.chunk_tokens
        rows: dict[str, Any] = {}
        for mode in [MODES["bf16"], *(mode for mode in modes if mode.name != "bf16")]:
            engine = perplexity.engine_arguments(
                len(windows[0]),
                dtype="bfloat16",
                chunk_tokens=chunk,
                kv_bytes=512 << 20,
                extra={**mode.engine, **SHARED},
            )
            first = mode.name == perplexity.BASELINE
            row = self.attempt(
                mode,
                "kl",
                lambda mode=mode, engine=engine, first=first: perplexity.run_mode(
                    self.model, windows, engine, self.environment(mode), self.folder, name=mode.name, save=first,
                    compare=not first, command=command(mode, DIVERGENCE),
                ),
            )  # fmt: skip
            if row is None:
                if first:
                    return
                continue
            rows[mode.name] = row
            self.write("kl.json", {**perplexity.summarize(self.model, windows, rows), "chunk_tokens": chunk})
            print(
                f"{mode.name:>30} perplexity {row['perplexity']:9.4f}  KL {row.get('kl', 0.0):.5f}  "
                f"same first choice {row.get('top1_agreement', 1.0):.4f}  {row['start_s']:.0f} + {row['eval_s']:.0f} s",
                flush=True,
            )

    def gsm8k(self, modes: list[KvMode]) -> None:
        """Answers to every prompt."""
        asked = {**self.inputs["gsm8k"], "prompts": self.inputs["gsm8k"]["prompts"][: self.options.limit]}
        rows: dict[str, Any] = {}
        for mode in modes:
            engine = {
                "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 512, "enable_prefix_caching": True,
                "kv_cache_memory_bytes": int(self.options.kv_gib * 2**30), "seed": 0, **mode.engine, **SHARED,
                **self.options.engine,
            }  # fmt: skip
            job = {"model": self.model, "engine": engine, **asked}
            row = self.attempt(
                mode,
                "gsm8k",
                lambda mode=mode, job=job: run_job(
                    command(mode, GENERATE), job, self.environment(mode), self.folder, name=mode.name
                ),
            )
            if row is None:
                continue
            rows[mode.name] = row
            self.write("answers.json", {"modes": rows, "model": self.model, "config": {"engine": self.options.engine}})
            print(
                f"{mode.name:>30} {len(row['answers'])} answers, {row['output_tokens']} tokens, {row['cut']} cut  "
                f"{row['start_s']:.0f} + {row['generate_s']:.0f} s",
                flush=True,
            )


def run(options: argparse.Namespace) -> None:
    """The part on the GPU's machine."""
    modes = parse_modes(options.modes, KNOWN)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "engine.log").unlink(missing_ok=True)
    failed = 0
    for task in options.tasks.split(","):
        with tempfile.TemporaryDirectory(prefix="fourfold-quality-") as folder:
            work = Run(options, Path(folder))
            {"kl": work.kl, "gsm8k": work.gsm8k}[task](modes)
            failed += work.failed
    if failed:
        raise SystemExit(f"{failed} engines failed; their output is in {options.out / 'engine.log'}")


def merge(folders: list[Path], name: str) -> dict[str, Any]:
    """One result of several processes' ``name``; {} if there is none.  Of modes that ran twice the first counts."""
    parts = [json.loads((folder / name).read_text(encoding="utf-8")) for folder in folders if (folder / name).exists()]
    if not parts:
        return {}
    result = {**parts[0], "model": Path(parts[0]["model"]).name}
    for key in ("modes", "engines"):
        result[key] = {mode: row for part in reversed(parts) for mode, row in part.get(key, {}).items()}
    order = [mode for mode in KNOWN if mode in result["modes"]]
    result["modes"] = {mode: result["modes"][mode] for mode in order}
    result["environment"].setdefault("commit", None)
    result["environment"]["commit"] = result["environment"]["commit"] or commit()
    return result


def score(options: argparse.Namespace) -> None:
    """File the results, GSM8K graded by lm-evaluation-harness."""
    kl = merge(options.folders, "kl.json")
    if kl:
        print(record(options.results, "kl-gpu", kl, command=kl["command"]))
    answered = merge(options.folders, "answers.json")
    if answered:
        graded: dict[str, Any] = {}
        for mode, row in answered["modes"].items():
            answers = row.pop("answers")
            questions = gsm8k.read_questions(options.gsm8k)[: len(answers)]
            graded[mode] = gsm8k.score(questions, answers)
        result = {
            **gsm8k.report(graded, answered["model"]),
            "engines": answered["modes"],
            "config": answered["config"],
            "environment": answered["environment"],
        }
        print(record(options.results, "gsm8k-gpu", result, command=answered["command"]))
        for mode, row in result["modes"].items():
            pair = result["against_bf16"].get(mode)
            print(
                f"{mode:>30} {points(row, 'exact_match')}", f"against bf16 {points(pair, 'difference')}" if pair else ""
            )


def points(row: dict[str, Any], key: str) -> str:
    """A share and its interval, in percent."""
    value, low, high = (100 * row[name] for name in (key, "low", "high"))
    return f"{value:.2f}% ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True, metavar="STEP")
    step = steps.add_parser("render", help="prompts and windows as one JSON file")
    step.add_argument("--model", type=Path, required=True, help="a folder with the tokenizer")
    step.add_argument("--gsm8k", type=Path, required=True, help="GSM8K's test.jsonl")
    step.add_argument("--text", type=Path, required=True, help="UTF-8 text for perplexity and KL")
    step.add_argument("--questions", type=int, help="only the first [all]")
    step.add_argument("--windows", type=int, default=16)
    step.add_argument("--window-tokens", type=int, default=1024)
    step.add_argument("--out", type=Path, required=True)
    step.set_defaults(work=render)
    step = steps.add_parser("run", help="the engines")
    step.add_argument("inputs", type=Path, help="what render wrote")
    step.add_argument("--model", type=Path, required=True, help="a folder of safetensors")
    step.add_argument("--modes", default="bf16,fp8,fourfold,turboquant_4bit_nc,turboquant_4bit_nc_every_layer")
    step.add_argument("--tasks", default="kl,gsm8k")
    step.add_argument("--gpu", help="index, as CUDA_VISIBLE_DEVICES [whatever vLLM takes]")
    step.add_argument("--chunk-tokens", type=int, default=32, help="of perplexity and KL")
    step.add_argument("--kv-gib", type=float, default=16.0, help="KV cache of GSM8K")
    step.add_argument("--engine", type=json.loads, default={}, help="more engine arguments of GSM8K, as JSON")
    step.add_argument("--limit", type=int, help="only the first windows and questions [all]")
    step.add_argument("--out", type=Path, required=True)
    step.set_defaults(work=run)
    step = steps.add_parser("score", help="grade, merge and file")
    step.add_argument("folders", type=Path, nargs="+", help="what run wrote")
    step.add_argument("--gsm8k", type=Path, required=True, help="the file that render read")
    step.add_argument("--results", type=Path, default=Path("results"))
    step.set_defaults(work=score)
    options = parser.parse_args()
    options.work(options)


if __name__ == "__main__":
    main()
