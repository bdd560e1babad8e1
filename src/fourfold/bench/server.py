"""Start a vLLM server for a measurement, wait until it is healthy, and take it down with all its processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from fourfold.errors import FourfoldError
from fourfold.logs import explain

START_TIMEOUT = 900.0
"""Seconds until /health must answer; a first start compiles and calibrates."""


def free_port() -> int:
    """A TCP port on the loopback interface that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(path: Path, lines: int = 25) -> str:
    """Why a program stopped, from its log: the first exception's message, and the last lines."""
    text = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return explain(text, lines)


@contextmanager
def running_server(
    command: list[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    port: int,
    timeout: float = START_TIMEOUT,
    waiting: Callable[[float], None] | None = None,
) -> Iterator[str]:
    """Run a server for the length of a ``with`` block; yields its URL.

    Args:
        command: the server's command line, which must contain the port.
        environment: its whole environment.
        log: file for its stdout and stderr.
        port: where it listens, on 127.0.0.1.
        timeout: seconds until it must be healthy.
        waiting: called with the seconds waited so far, for a progress bar.

    Raises:
        FourfoldError: it ended or was not healthy in time; the log's tail is in the message.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a process group of its own, so that the engine's workers end with it
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(process, url, log, timeout, waiting)
        yield url
    finally:
        stop(process)


def _wait_until_healthy(
    process: subprocess.Popen[bytes], url: str, log: Path, timeout: float, waiting: Callable[[float], None] | None
) -> None:
    start = time.monotonic()
    with httpx.Client(timeout=5, trust_env=False) as client:
        while True:
            passed = time.monotonic() - start
            if process.poll() is not None:
                raise FourfoldError(
                    f"the server ended with code {process.returncode} before it was ready",
                    why=tail(log),
                )
            try:
                if client.get(f"{url}/health").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if passed > timeout:
                raise FourfoldError(
                    f"the server was not healthy after {timeout:.0f} s",
                    why=tail(log),
                )
            if waiting:
                waiting(passed)
            time.sleep(0.3)


def stop(process: subprocess.Popen[bytes], grace: float = 15.0) -> None:
    """End a process group: interrupt, then terminate, then kill what is left.

    Where this process ignores interrupts, as one that a shell started in the background does, its children do too.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signs = [(signal.SIGTERM, grace)] if ignored else [(signal.SIGINT, grace), (signal.SIGTERM, 5.0)]
    for sign, patience in (*signs, (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and _group_alive(process):
            time.sleep(0.1)
        if not _group_alive(process):
            break
    process.wait()


def _group_alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # reaps the leader, which would otherwise stay in the group as a zombie
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
