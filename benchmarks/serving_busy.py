"""Who is busy during a load: the GPU, the engine's loop, or the client that sends it.

A step is scheduled and prepared by one Python thread.  Where that thread is busy all the time, faster kernels no longer
make faster tokens.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from types import TracebackType
from typing import Any

import psutil

SHARES = ("gpu_busy", "engine_loop_busy", "client_busy")


def _gpu() -> Any:
    """NVML's handle of the first visible GPU, or None where there is no NVML."""
    from vllm.third_party import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    try:
        pynvml.nvmlInit()
        if visible.isdigit():
            return pynvml.nvmlDeviceGetHandleByIndex(int(visible))
        return pynvml.nvmlDeviceGetHandleByUUID(visible.encode())
    except pynvml.NVMLError:
        return None


def _loop_seconds(process: psutil.Process) -> float:
    """Processor seconds of a process's first thread."""
    return next((t.user_time + t.system_time for t in process.threads() if t.id == process.pid), 0.0)


def _engine() -> psutil.Process | None:
    """vLLM's engine core among our children, by the title that it gives itself."""
    children = psutil.Process().children(recursive=True)
    return next((child for child in children if "EngineCore" in " ".join(child.cmdline())), None)


class Busy:
    """Context of a load; afterwards ``shares`` has, of its wall time, 0 to 1:

    ``gpu_busy``: in which some kernel ran (NVML, sampled 10 times a second; None without NVML).
    ``engine_loop_busy``: in which the engine core's first thread ran on a processor (None without such a process).
    ``client_busy``: the same of this process's first thread.
    """

    def __enter__(self) -> Busy:
        self.shares: dict[str, float | None] = {}
        self._handle, self._engine, self._samples = _gpu(), _engine(), list[float]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._began = time.perf_counter()
        self._before = self._seconds()
        self._thread.start()
        return self

    def _seconds(self) -> list[float]:
        processes = [psutil.Process(), *([self._engine] if self._engine else [])]
        return [_loop_seconds(process) for process in processes]

    def _sample(self) -> None:
        from vllm.third_party import pynvml

        while self._handle is not None and not self._stop.wait(0.1):
            self._samples.append(pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        took = time.perf_counter() - self._began
        used = [(after - before) / took for before, after in zip(self._before, self._seconds(), strict=True)]
        gpu = statistics.mean(self._samples) if self._samples else None
        self.shares = dict(zip(SHARES, (gpu, used[1] if len(used) > 1 else None, used[0]), strict=True))
