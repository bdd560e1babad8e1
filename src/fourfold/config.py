"""Settings, and the one registry of environment names.

The engine runs in several processes and a plugin is loaded before any flag is parsed, so settings travel
as environment variables.  ``fourfold serve`` sets them from its flags; ``vllm serve`` users set them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from fourfold.errors import FourfoldError

Prefill = Literal["pages", "raw"]

ENVIRONMENT: dict[str, tuple[str, str]] = {
    # attribute: (variable, what it does)
    "enabled": ("FOURFOLD", "1 switches the plugin on, 0 or unset leaves vLLM as it is"),
    "calibration": ("FOURFOLD_CALIBRATION", "auto (default), none (data-free), or a .safetensors file"),
    "calibration_text": ("FOURFOLD_CALIBRATION_TEXT", "a UTF-8 text file to calibrate on (default: the one shipped)"),
    "prefill": ("FOURFOLD_PREFILL", "pages (default): every query reads codes; raw: a chunk reads itself unquantised"),
    "cache_dir": ("FOURFOLD_CACHE_DIR", "calibrations and compiled kernels (default ~/.cache/fourfold)"),
}


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/fourfold`` or ``~/.cache/fourfold``."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fourfold"


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator can choose.

    Attributes:
        enabled: the plugin does nothing at all unless this is set.
        calibration: ``auto`` calibrates at the first start and caches by model and revision; ``none`` uses
            what the weights alone tell; anything else is the path of a calibration file.
        calibration_text: what to calibrate on; empty for the text that ships with Fourfold.
        prefill: ``pages``: every query attends to the codes that later queries will also see, so that text
            does not depend on chunking, prefix hits, preemption or speculation.  ``raw``: the tokens of a
            chunk attend to each other unquantised; slightly better text, no such promise.
        cache_dir: where calibrations and compiled kernels are kept.
    """

    enabled: bool = False
    calibration: str = "auto"
    calibration_text: str = ""
    prefill: Prefill = "pages"
    cache_dir: Path = Path("~/.cache/fourfold")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read and check every variable; an unknown value or an unknown FOURFOLD_* name is an error."""
        env = os.environ if environ is None else environ
        known = {variable for variable, _ in ENVIRONMENT.values()}
        for name in env:
            if name.startswith("FOURFOLD_") and name not in known and name not in AUXILIARY:
                raise FourfoldError(
                    f"unknown environment variable {name}", fix=f"use one of {', '.join(sorted(known))}"
                )
        switch = env.get("FOURFOLD", "0").strip().lower()
        if switch not in ("", "0", "1", "true", "false"):
            raise FourfoldError(f"FOURFOLD={switch} is neither on nor off", fix="set FOURFOLD=1 or FOURFOLD=0")
        prefill = env.get("FOURFOLD_PREFILL", "pages")
        if prefill not in get_args(Prefill):
            raise FourfoldError(f"FOURFOLD_PREFILL={prefill} is unknown", fix="set it to pages or raw")
        calibration = env.get("FOURFOLD_CALIBRATION", "auto")
        cache = env.get("FOURFOLD_CACHE_DIR")
        return cls(
            enabled=switch in ("1", "true"),
            calibration=calibration,
            calibration_text=env.get("FOURFOLD_CALIBRATION_TEXT", ""),
            prefill=prefill,  # type: ignore[arg-type]
            cache_dir=Path(cache).expanduser() if cache else default_cache_dir(env),
        )

    def to_env(self) -> dict[str, str]:
        """The variables that make ``from_env`` return these settings."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            ENVIRONMENT[name][0]: ("1" if value else "0") if isinstance(value, bool) else str(value)
            for name, value in values.items()
        }


AUXILIARY = {"FOURFOLD_EXPECT_GPU"}
"""Names read by the tests only."""
