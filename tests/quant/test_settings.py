"""Settings from the environment and files that are whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.config import Settings
from fourfold.errors import FourfoldError
from fourfold.files import write_json, write_text


def test_round_trip() -> None:
    settings = Settings.from_env({"FOURFOLD": "1", "FOURFOLD_PREFILL": "raw", "FOURFOLD_CACHE_DIR": "/somewhere"})
    assert settings.enabled
    assert settings.prefill == "raw"
    assert Settings.from_env(settings.to_env()) == settings
    assert not Settings.from_env({}).enabled


@pytest.mark.parametrize("env", [{"FOURFOLD": "yes"}, {"FOURFOLD_PREFILL": "fast"}, {"FOURFOLD_CALIBRTION": "none"}])
def test_mistakes_are_named(env: dict[str, str]) -> None:
    with pytest.raises(FourfoldError, match=next(iter(env))):
        Settings.from_env(env)


def test_nothing_half_written(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "before")
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.txt", {"x": float("nan")})
    assert (tmp_path / "a.txt").read_text() == "before"
    assert [f.name for f in tmp_path.iterdir()] == ["a.txt"]
