"""One KV mode in a process of its own: a JSON job in, a JSON result out, everything it prints in a log."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fourfold.errors import FourfoldError
from fourfold.files import write_json
from fourfold.logs import explain


def run_job(
    command: Sequence[str],
    job: Mapping[str, Any],
    environment: Mapping[str, str],
    folder: Path,
    *,
    name: str,
    on_line: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run ``python COMMAND… JOB.json`` to its end and return what it wrote to ``job["result"]``.

    Args:
        command: like ``("-m", "fourfold.evals.worker")``.
        job: goes to ``folder/NAME.job.json``, with ``result`` added to it.
        environment: the whole environment of the process.
        folder: for the job, the result and the log ``NAME.log``.
        name: of the mode.
        on_line: called with every line that the process prints.

    Raises:
        FourfoldError: the process stopped; what its log says is in the message.
    """
    result, log = folder / f"{name}.json", folder / f"{name}.log"
    job_file = write_json(folder / f"{name}.job.json", {**job, "result": str(result)})
    with log.open("w", encoding="utf-8") as sink:
        process = subprocess.Popen(
            [sys.executable, *command, str(job_file)],
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                sink.write(line)
                if on_line:
                    on_line(line)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()
    if process.returncode or not result.is_file():
        text = log.read_text(encoding="utf-8", errors="replace").splitlines()
        raise FourfoldError(f"the engine stopped in KV mode {name}", why=explain(text))
    return dict(json.loads(result.read_text(encoding="utf-8")))


def work(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The other side of ``run_job``: ``python -m MODULE JOB.json`` reads its job and writes ``run``'s result."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    write_json(job["result"], run(job))
