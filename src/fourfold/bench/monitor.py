"""What the server says about itself: version, model, cache configuration, and a time series from /metrics."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

import httpx

from fourfold.errors import FourfoldError

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the Prometheus text format."""

    name: str
    labels: dict[str, str]
    value: float


def parse_metrics(text: str) -> list[Sample]:
    """Parse the Prometheus text format; lines that are not samples are left out."""
    samples = []
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line.strip())
        if match:
            try:
                value = float(match.group(3))
            except ValueError:
                continue
            samples.append(Sample(match.group(1), dict(_LABEL.findall(match.group(2) or "")), value))
    return samples


def total(samples: list[Sample], name: str) -> float:
    """Sum over all engines of one metric; 0 when it is absent."""
    return sum(sample.value for sample in samples if sample.name == name)


@dataclass(slots=True)
class Series:
    """Readings of /metrics during a run; times in seconds from its start, ``kv_usage`` from 0 to 1."""

    t: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    kv_usage: list[float] = field(default_factory=list)
    preemptions: list[float] = field(default_factory=list)

    def add(self, at: float, samples: list[Sample], preemptions_before: float) -> None:
        """Append one reading."""
        self.t.append(round(at, 3))
        self.running.append(total(samples, "vllm:num_requests_running"))
        self.waiting.append(total(samples, "vllm:num_requests_waiting"))
        usage = [s.value for s in samples if s.name == "vllm:kv_cache_usage_perc"]
        self.kv_usage.append(round(max(usage, default=0.0), 4))
        self.preemptions.append(total(samples, "vllm:num_preemptions_total") - preemptions_before)

    def from_first_request(self) -> Series:
        """The readings from the last idle one before the first request, whose time becomes zero."""
        busy = next((i for i in range(len(self.t)) if self.running[i] or self.waiting[i]), 0)
        first = max(0, busy - 1)
        cut = Series(**{key: list(values)[first:] for key, values in asdict(self).items()})
        cut.t = [round(at - self.t[first], 3) for at in cut.t]
        return cut

    def as_json(self) -> dict[str, list[float]]:
        """Lists of equal length."""
        return asdict(self)


class Monitor:
    """Samples /metrics in a thread between ``__enter__`` and ``__exit__``."""

    def __init__(self, url: str, interval: float = 0.5) -> None:
        self.url, self.interval = url.rstrip("/"), interval
        self.series = Series()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._before = 0.0
        self._start = 0.0

    def __enter__(self) -> Monitor:
        self._before = total(fetch_metrics(self.url), "vllm:num_preemptions_total")
        self._start = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=15)
        if kind is None:
            self._read()  # the last reading is taken here, so that a preemption at the very end counts

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            try:
                self._read()
            except FourfoldError:
                continue  # a busy server may miss a reading; the next one catches up

    def _read(self) -> None:
        samples = fetch_metrics(self.url)
        self.series.add(time.monotonic() - self._start, samples, self._before)

    @property
    def preemptions(self) -> int:
        """Preemptions since the start."""
        return int(self.series.preemptions[-1]) if self.series.preemptions else 0


def fetch_metrics(url: str) -> list[Sample]:
    """Read /metrics once.

    Raises:
        FourfoldError: the server does not answer.
    """
    return parse_metrics(_get(f"{url.rstrip('/')}/metrics").text)


def _get(url: str) -> httpx.Response:
    try:
        response = httpx.get(url, timeout=10, trust_env=False)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise FourfoldError(
            f"{url} does not answer",
            why=str(error) or type(error).__name__,
            fix="start a server first: fourfold serve MODEL",
        ) from error
    return response


def _number(text: str | None) -> Any:
    """Prometheus labels are strings: numbers, true, false and None become what they stand for."""
    if text in (None, "None"):
        return None
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


CACHE_KEYS = (
    "block_size",
    "num_gpu_blocks",
    "cache_dtype",
    "kv_cache_memory_bytes",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "sliding_window",
)


def describe(url: str) -> dict[str, Any]:
    """The engine as the server itself describes it: version, model, cache configuration, capacity in tokens.

    ``capacity_tokens`` is ``num_gpu_blocks × block_size`` of ``vllm:cache_config_info``.
    """
    base = url.rstrip("/")
    version = _get(f"{base}/version").json().get("version")
    models = _get(f"{base}/v1/models").json().get("data") or [{}]
    info = next((s.labels for s in fetch_metrics(base) if s.name == "vllm:cache_config_info"), {})
    cache = {key: _number(info[key]) for key in CACHE_KEYS if key in info}
    blocks, block_size = cache.get("num_gpu_blocks"), cache.get("block_size")
    return {
        "version": version,
        "model": str(models[0].get("id", "")),
        "max_model_len": models[0].get("max_model_len"),
        "cache": cache,
        "capacity_tokens": blocks * block_size if isinstance(blocks, int) and isinstance(block_size, int) else None,
    }
