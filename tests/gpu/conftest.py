"""Tests marked ``gpu`` need a CUDA device: without one they are deselected and the reason is printed, unless
FOURFOLD_EXPECT_GPU=1, which makes them run and fail."""

from __future__ import annotations

import os

import pytest
import torch

_left_out: list[pytest.Item] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or os.environ.get("FOURFOLD_EXPECT_GPU") == "1":
        return
    gone = [item for item in items if item.get_closest_marker("gpu")]
    if gone:
        _left_out.extend(gone)
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        terminalreporter.write_line(f"{len(_left_out)} tests marked gpu left out: this machine has no CUDA device")


@pytest.fixture
def cuda() -> torch.device:
    """The CUDA device; fails where there is none."""
    assert torch.cuda.is_available(), "FOURFOLD_EXPECT_GPU=1 but there is no CUDA device"
    return torch.device("cuda")
