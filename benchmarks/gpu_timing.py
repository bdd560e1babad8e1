"""Timing on a GPU: CUDA graphs over several input sets larger than the L2 cache, medians, and the copy ceiling."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_us(calls: Sequence[Callable[[], None]], *, target_ms: float = 4.0, repeats: int = 15) -> float:
    """Median µs of one call.

    ``calls`` (one for each input set) are captured one after the other, often enough to fill ``target_ms``; the graph
    is replayed ``repeats`` times between events.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()

    def replayed(rounds: int, times: int) -> list[float]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        graph.replay()
        results = []
        for _ in range(times):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            results.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
        return results

    first = statistics.median(replayed(1, 3))
    rounds = max(1, min(20, round(target_ms * 1e3 / (first * len(calls)))))
    return statistics.median(replayed(rounds, repeats))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large device-to-device copy, read and written counted."""
    source = torch.randint(0, 256, (2**31,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(10):  # outside a graph: a captured copy becomes a slower node
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() / statistics.median(times) * 1e3


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖; NaN stays NaN, which fails every comparison."""
    return ((out.double() - reference.double()).norm() / reference.double().norm()).item()
