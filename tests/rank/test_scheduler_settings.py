"""Flags and variables of the ranked scheduler, before any engine starts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fourfold.cli.main import app
from fourfold.cli.serve import SCHEDULER, metrics_folder, scheduler_settings
from fourfold.config import Settings
from fourfold.errors import FourfoldError

BAD = [
    {"FOURFOLD_MAX_OVERTAKE_S": "soon"},
    {"FOURFOLD_MAX_OVERTAKE_S": "-1"},
    {"FOURFOLD_MAX_OVERTAKE_S": "inf"},
    {"FOURFOLD_MAX_PREEMPTIONS": "1.5"},
    {"FOURFOLD_TRUST_MAX_TOKENS": "perhaps"},
    {"FOURFOLD_ANSWER_LIMIT": "-5"},
    {"FOURFOLD_RANKER_OPTIONAL": "2"},
]


@pytest.mark.parametrize("environ", BAD, ids=str)
def test_bad_values_are_refused_by_name(environ: dict[str, str]) -> None:
    with pytest.raises(FourfoldError, match=next(iter(environ))):
        Settings.from_env(environ)


def test_settings_survive_the_environment() -> None:
    settings = Settings.from_env({})
    assert settings.trust_max_tokens
    assert settings.ranker == "default"
    changed = replace(
        settings, ranker="x.safetensors", ranker_optional=True, max_overtake_s=2.5, max_preemptions=0,
        trust_max_tokens=False, answer_limit=128, record_lengths="t.jsonl", record_prompts=True, ranker_device="cuda:0",
    )  # fmt: skip
    assert Settings.from_env(changed.to_env()) == changed


def serve(*flags: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["serve", "m", *flags, "--json"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_flags_become_a_scheduler_class_and_variables(tmp_path: Path) -> None:
    plain = serve()
    assert "--scheduler-cls" not in plain["command"]  # type: ignore[operator]
    ranked = serve("--scheduler", "ranked", "--max-model-len", "64")
    assert ranked["command"][-4:] == ["--scheduler-cls", SCHEDULER, "--max-model-len", "64"]  # type: ignore[index]
    assert ranked["environment"]["FOURFOLD_RANKER"] == "default"  # type: ignore[index]
    trace = tmp_path / "trace.jsonl"
    recording = serve("--record-lengths", str(trace), "--record-prompts")
    assert SCHEDULER in recording["command"]  # type: ignore[operator]
    environment = recording["environment"]
    assert (environment["FOURFOLD_RANKER"], environment["FOURFOLD_RECORD_LENGTHS"]) == ("off", str(trace))  # type: ignore[index]
    assert not trace.exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--scheduler", "sjf"], "unknown scheduler"),
        (["--ranker", "default"], "first-come order"),
        (["--record-prompts"], "needs a file"),
        (["--scheduler", "ranked", "--ranker", "missing.safetensors"], "there is no ranker file"),
        (["--scheduler", "ranked", "--scheduler-cls", "a.B"], "does not go together"),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_model_loads(flags: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["serve", "m", *flags])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_an_optional_ranker_is_left_to_the_engine(tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"x")
    with pytest.raises(FourfoldError, match="cannot be read"):
        scheduler_settings(Settings(), "ranked", str(bad), False, None, False)
    settings, flags = scheduler_settings(Settings(), "ranked", str(bad), True, None, False)
    assert (settings.ranker, settings.ranker_optional) == (str(bad), True)
    assert flags == ["--scheduler-cls", SCHEDULER]


def test_metrics_of_dead_servers_are_removed(tmp_path: Path) -> None:
    base = tmp_path / "metrics"
    dead, alive, other = base / "99999999", base / str(os.getppid()), base / "notes"
    for folder in (dead, alive, other):
        folder.mkdir(parents=True)
        (folder / "counter.db").write_bytes(b"x")
    folder = metrics_folder(tmp_path)
    assert folder == base / str(os.getpid())
    assert list(folder.iterdir()) == []
    assert not dead.exists()
    assert (alive / "counter.db").exists()
    assert (other / "counter.db").exists()
    (folder / "counter.db").write_bytes(b"x")
    assert list(metrics_folder(tmp_path).iterdir()) == []
