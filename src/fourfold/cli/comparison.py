"""The work of ``fourfold demo``: one server after the other, each started, warmed up, loaded, and measured for quality.

Nothing else of ours runs beside a load.  What can wait or be done ahead is done while a server starts: reading the
data set and the text, and importing the load generator.  Quality is measured on the server that has just served the
load, so that no further engine has to start.
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.cli.common import Working, err, working
from fourfold.config import Settings
from fourfold.modes import MODES, KvMode, environment

if TYPE_CHECKING:
    from fourfold.bench.load import Driver
    from fourfold.bench.prompts import Request
    from fourfold.bench.showcase import Plan

MODE_NAMES = ("bf16", "fourfold")
SERVED = "model"
"""The name under which every server serves its model."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is compared: the options of the command.

    Attributes:
        budget: KV bytes (see ``showcase.allotted_bytes``).
        environ: vLLM's own settings (see ``showcase.server_environment``); those of this process come first.
        request_rate: requests a second, or None: found by a probe of the first server.
        num_prompts: requests to send, or None: as many as arrive in the plan's time.
        ranked: vLLM's flags for the ranked scheduler; empty where only vLLM's own is to serve.
    """

    model: str
    settings: Settings
    plan: Plan
    budget: int
    block_size: int
    dtype: str
    environ: dict[str, str]
    request_rate: float | None
    num_prompts: int | None
    dataset_path: Path | None
    text: Path | None
    ranked: list[str]


@dataclass(frozen=True, slots=True)
class Material:
    """What the servers are given: requests of the load, and windows of token ids for quality."""

    requests: list[Request]
    windows: list[list[int]]

    @property
    def mean_output(self) -> float:
        """Tokens that an answer has on average."""
        return sum(request.output_tokens for request in self.requests) / len(self.requests)


def read_material(task: Task, folder: Path) -> Material:
    """Tokenizer, ShareGPT and text; seconds, most of them for importing transformers.

    Raises:
        FourfoldError: one of them cannot be used, or ``folder`` has no room for the baseline's log-probabilities.
    """
    from fourfold.bench.prompts import load, select
    from fourfold.bench.tokenizer import encoder, load_tokenizer, renderer
    from fourfold.evals.perplexity import check_room
    from fourfold.evals.windows import cut_windows, read_text
    from fourfold.rank.corpora import HELD_OUT, prompt_hash

    words, plan = load_tokenizer(task.model), task.plan
    prompts = load("sharegpt", task.dataset_path)
    if task.ranked and task.dataset_path is None:  # what the default ranker was trained on would flatter it
        prompts = [prompt for prompt in prompts if prompt_hash(prompt.text) < HELD_OUT]
    requests = select(
        prompts,
        task.num_prompts or plan.max_requests,
        encoder(words),
        renderer(words),
        max_model_len=plan.max_len,
        max_prompt_tokens=plan.prompt_tokens,
        max_output_tokens=plan.answer_tokens,
        min_output_tokens=plan.min_answer_tokens,
        cut_answers=plan.cut_answers,
    )
    windows = cut_windows(words, read_text(task.text), plan.windows, plan.window_tokens)
    check_room(folder, windows, len(words))
    return Material(requests, windows)


class _Comparison:
    """The servers one after the other; what the first one decides, the request rate and their number, holds for all."""

    def __init__(self, task: Task, folder: Path, material: Future[Material]) -> None:
        self.task, self.folder, self.material = task, folder, material
        self.rate, self.count = task.request_rate, task.num_prompts
        self.results: dict[str, dict[str, Any]] = {}
        self.quality: dict[str, dict[str, Any]] = {}
        self.phases: dict[str, dict[str, float]] = {}

    def serve(self, mode: KvMode, ranked: list[str]) -> None:
        """Start a server, warm it up, send the load, and measure quality unless the scheduler is all that differs."""
        from fourfold.bench import showcase
        from fourfold.bench.load import Driver
        from fourfold.bench.server import free_port, running_server
        from fourfold.cli.serve import server_command
        from fourfold.evals.engine import SERVER_ENVIRONMENT, SERVER_FLAGS

        task, port = self.task, free_port()
        name = mode.name + showcase.RANKED if ranked else mode.name
        flags = showcase.server_flags(mode, task.budget, task.dtype, port, task.block_size, task.plan.max_len)
        command = server_command(task.model, [*flags, *SERVER_FLAGS, *ranked], sys.executable)
        environ = {**task.environ, **environment(mode, task.settings), **SERVER_ENVIRONMENT}
        lap = _Laps()
        with Driver() as driver, working(f"{name}: starting vLLM …") as status:

            def waiting(seconds: float) -> None:
                status.update(f"{name}: starting vLLM … {seconds:.0f} s")
                if self.material.done():
                    self.material.result()  # what cannot be read ends the wait

            log = self.folder / f"{name}.log"
            with running_server(command, environ, log, port=port, waiting=waiting) as url:
                requests = self.material.result().requests
                lap("start")
                status.phase(f"{name}: warming up …")
                probe = showcase.probe_throughput(url, requests[:10])
                lap("warm_up")
                result = self._load(url, name, probe, driver, status)
                lap("load")
                if not ranked:
                    self._measure_quality(url, mode.name, status)
                    lap("quality")
            lap("stop")
        result["start_s"] = lap.seconds["start"]
        result["probe_tokens_per_s"] = round(probe, 1)
        result["kv_bytes_allotted"] = showcase.allotted_bytes(mode, task.budget, task.dtype)
        self.results[name], self.phases[name] = result, lap.seconds
        held, ttft = result["engine"]["capacity_tokens"] or 0, result["ttft_mean_s"] or 0.0
        err.print(f"{name}: {held:,} KV tokens, mean TTFT {ttft:.2f} s, {result['preemptions']} preemptions")

    def _load(self, url: str, name: str, probe: float, driver: Driver, status: Working) -> dict[str, Any]:
        """Send the load; ``probe`` is what the server reached, output tokens a second."""
        from fourfold.bench.load import LoadSettings, run_load

        task, material = self.task, self.material.result()
        if self.rate is None:
            self.rate = task.plan.overload * probe / material.mean_output
        if self.count is None:
            self.count = task.plan.requests(self.rate)
        load = LoadSettings(request_rate=self.rate, seed=1, ignore_eos=True, temperature=0.7, max_degenerate=1.0)
        title = f"{name}: {self.count} requests at {self.rate:.2f}/s"
        status.phase(title)

        def show(seconds: float, running: float, waiting: float) -> None:
            status.update(f"{title} · {seconds:.0f} s · {running:.0f} running · {waiting:.0f} waiting")

        requests = material.requests[: self.count]
        return run_load(url, requests, load, model=SERVED, tokenizer=task.model, progress=show, driver=driver)

    def _measure_quality(self, url: str, name: str, status: Working) -> None:
        """Perplexity on the server as it is after its load; the baseline's log-probabilities stay for the next."""
        from fourfold.evals.engine import ServedEngine, measure_windows
        from fourfold.evals.perplexity import BASELINE

        windows = self.material.result().windows
        status.phase(f"{name}: perplexity …")
        self.quality[name] = measure_windows(
            ServedEngine(url, SERVED),
            windows,
            self.folder,
            save=name == BASELINE,
            compare=name != BASELINE,
            progress=lambda done: status.update(f"{name}: perplexity, window {done} of {len(windows)}"),
        )


class _Laps:
    """Seconds by phase: each call ends one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def __call__(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] = round(now - self._last, 1)
        self._last = now


def compare(task: Task) -> dict[str, Any]:
    """Serve, load and measure every mode; metrics.json without the environment."""
    from fourfold.bench import showcase
    from fourfold.bench.record import without_paths
    from fourfold.evals.perplexity import summarize

    with tempfile.TemporaryDirectory(prefix="fourfold-demo-") as name, ThreadPoolExecutor(1) as pool:
        folder = Path(name)
        run = _Comparison(task, folder, pool.submit(read_material, task, folder))
        for flags in ([], task.ranked) if task.ranked else ([],):
            for mode in MODE_NAMES:
                run.serve(MODES[mode], flags)
        material = run.material.result()
    quality = summarize(task.model, material.windows, run.quality)
    metrics = showcase.assemble(run.results, quality, task.budget, task.dtype, task.model, run.rate or 0.0, task.text)
    return {**without_paths(metrics), "phases": run.phases}
