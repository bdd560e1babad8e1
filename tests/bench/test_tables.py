"""README's tables: generated from results, and drift is found."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from fourfold.bench.record import main, record, without_paths
from fourfold.errors import FourfoldError


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "tables.py"
    spec = importlib.util.spec_from_file_location("tables", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path: Path) -> Path:
    modes = {"bf16": {"capacity_tokens": 2176, "perplexity": 21.53, "kl": 0.0}}
    modes["fourfold"] = {"capacity_tokens": 8192, "perplexity": 22.1, "kl": 0.0198, "top1_agreement": 0.93}
    record(tmp_path / "results", "demo", {"modes": modes}, command=["fourfold", "demo"])
    rows = [{"batch": 8, "context": 4096, "us": {"fourfold": 12.5, "fa3_bf16": 31.0}, "ratio": {"fa3_bf16": 2.48}}]
    record(tmp_path / "results", "decode", {"rows": rows}, command=["python", "benchmarks/decode.py"])
    text = "# A\n\n<!-- results:demo -->\n<!-- /results -->\ntext\n<!-- results:demo:eval -->\nold\n<!-- /results -->\n"
    (tmp_path / "README.md").write_text(text + "<!-- results:decode -->\n<!-- /results -->\nend\n")
    return tmp_path


def run(tables: ModuleType, project: Path, *arguments: str) -> int:
    return tables.main(["--readme", str(project / "README.md"), "--results", str(project / "results"), *arguments])


def test_blocks_are_written_and_then_agree(tables: ModuleType, project: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tables, project, "--check") == 1
    assert "+| KV capacity, tokens | 2,176 | 8,192 |" in capsys.readouterr().out
    assert run(tables, project) == 0
    text = (project / "README.md").read_text()
    assert "| fourfold | 22.100 | +2.65% | 0.0198 | 93.0% |" in text
    assert "| 8 | 4,096 | 12.5 | 31.0 | 2.48 |" in text
    assert "\nold\n" not in text
    assert text.startswith("# A\n")
    assert text.endswith("end\n")
    assert run(tables, project, "--check") == 0


def test_a_changed_result_is_drift(tables: ModuleType, project: Path) -> None:
    run(tables, project)
    path = project / "results" / "demo" / "metrics.json"
    value = json.loads(path.read_text())
    value["modes"]["fourfold"]["capacity_tokens"] = 8191
    path.write_text(json.dumps(value))
    before = (project / "README.md").read_text()
    assert run(tables, project, "--check") == 1
    assert (project / "README.md").read_text() == before


@pytest.mark.parametrize(
    "block",
    [
        "<!-- results:absent -->\n<!-- /results -->\n",
        "<!-- results:demo -->\n",
        "<!-- results:demo:odd -->\n<!-- /results -->\n",
    ],
)
def test_unusable_blocks_stop(tables: ModuleType, project: Path, block: str) -> None:
    (project / "README.md").write_text(block)
    with pytest.raises(SystemExit):
        run(tables, project, "--check")


def test_a_record_says_where_it_was_taken_and_names_no_paths(tmp_path: Path) -> None:
    command = [
        "fourfold",
        "eval",
        "kl",
        "/data/models/qwen",
        "--text=/home/x/test.txt",
        "--url",
        "http://127.0.0.1:80/v1",
    ]
    path = record(tmp_path, "kl-qwen", {"modes": {}}, command=command, config={"model": "/data/models/qwen", "n": 3})
    value = json.loads(path.read_text())
    assert value["command"] == "fourfold eval kl qwen --text=test.txt --url http://127.0.0.1:80/v1"
    assert value["config"] == {"model": "qwen", "n": 3}
    assert {"cpu", "cores", "python", "packages", "commit", "date"} <= set(value["environment"])
    assert str(tmp_path) not in path.read_text()


def test_ratios_and_dates_are_not_paths() -> None:
    for text in ("and/or", "tokens/s", "2026-01-02 10:00", "bf16/fp8", "https://example.org/a/b", "1/2"):
        assert without_paths(text) == text


def test_result_names() -> None:
    with pytest.raises(FourfoldError):
        record(Path("."), "../x", {}, command=[])


def test_a_commands_json_is_filed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = tmp_path / "out.json"
    source.write_text(json.dumps({"modes": {"bf16": {"perplexity": 3.5}}, "model": "/data/models/m"}))
    main(["kl-m", str(source), "--root", str(tmp_path / "results"), "--", "fourfold", "eval", "kl", "/data/models/m"])
    path = Path(capsys.readouterr().out.strip())
    value = json.loads(path.read_text())
    assert path == tmp_path / "results" / "kl-m" / "metrics.json"
    assert (value["model"], value["command"]) == ("m", "fourfold eval kl m")
    assert value["modes"] == {"bf16": {"perplexity": 3.5}}
