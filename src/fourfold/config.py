"""Settings, and the one registry of environment names.

The engine runs in several processes and a plugin is loaded before any flag is parsed, so settings travel
as environment variables.  ``fourfold serve`` sets them from its flags; ``vllm serve`` users set them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from fourfold.errors import FourfoldError

Prefill = Literal["pages", "raw"]
N = TypeVar("N", int, float)

ENVIRONMENT: dict[str, tuple[str, str]] = {
    # attribute: (variable, what it does)
    "enabled": ("FOURFOLD", "1 switches the plugin on, 0 or unset leaves vLLM as it is"),
    "calibration": ("FOURFOLD_CALIBRATION", "auto (default), none (data-free), or a .safetensors file"),
    "calibration_text": ("FOURFOLD_CALIBRATION_TEXT", "a UTF-8 text file to calibrate on (default: the one shipped)"),
    "prefill": ("FOURFOLD_PREFILL", "pages (default): every query reads codes; raw: a chunk reads itself unquantised"),
    "cache_dir": ("FOURFOLD_CACHE_DIR", "calibrations and compiled kernels (default ~/.cache/fourfold)"),
    "ranker": (
        "FOURFOLD_RANKER",
        "for the ranked scheduler: default, off, oracle (load tests), or a path",
    ),
    "ranker_optional": ("FOURFOLD_RANKER_OPTIONAL", "1: a ranker that cannot be used means first-come, not the end"),
    "ranker_device": ("FOURFOLD_RANKER_DEVICE", "where a transformer ranker runs (default cpu)"),
    "max_overtake_s": ("FOURFOLD_MAX_OVERTAKE_S", "by how many seconds a later request may overtake (default 30)"),
    "max_preemptions": ("FOURFOLD_MAX_PREEMPTIONS", "how often one request can be preempted (default 2)"),
    "trust_max_tokens": ("FOURFOLD_TRUST_MAX_TOKENS", "0: max_tokens says nothing about the length (load tests)"),
    "answer_limit": ("FOURFOLD_ANSWER_LIMIT", "no answer is longer than so many tokens (default 0: not known)"),
    "record_lengths": ("FOURFOLD_RECORD_LENGTHS", "file to which the ranked scheduler appends lengths and hashes"),
    "record_prompts": ("FOURFOLD_RECORD_PROMPTS", "1: record the prompts' text as well"),
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
        ranker: what the ranked scheduler ranks with: ``default``, the path of a file or folder, ``off`` (it is then
            vLLM's own scheduler), or ``oracle``, which takes max_tokens of ignore_eos requests for their length.
        ranker_optional: first-come with a warning where the ranker cannot be used, instead of no start.
        ranker_device: torch device of a transformer ranker.
        max_overtake_s, max_preemptions, trust_max_tokens, answer_limit: see ``rank.policy.PolicyConfig``.
        record_lengths: a file that gets a line for each finished request; empty for none.
        record_prompts: whether those lines hold the prompts' text and not only hashes of it.
    """

    enabled: bool = False
    calibration: str = "auto"
    calibration_text: str = ""
    prefill: Prefill = "pages"
    cache_dir: Path = Path("~/.cache/fourfold")
    ranker: str = "default"
    ranker_optional: bool = False
    ranker_device: str = "cpu"
    max_overtake_s: float = 30.0
    max_preemptions: int = 2
    trust_max_tokens: bool = True
    answer_limit: int = 0
    record_lengths: str = ""
    record_prompts: bool = False

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
        prefill = env.get("FOURFOLD_PREFILL", "pages")
        if prefill not in get_args(Prefill):
            raise FourfoldError(f"FOURFOLD_PREFILL={prefill} is unknown", fix="set it to pages or raw")
        calibration = env.get("FOURFOLD_CALIBRATION", "auto")
        cache = env.get("FOURFOLD_CACHE_DIR")
        return cls(
            enabled=_switch(env, "FOURFOLD", False),
            calibration=calibration,
            calibration_text=env.get("FOURFOLD_CALIBRATION_TEXT", ""),
            prefill=prefill,  # type: ignore[arg-type]
            cache_dir=Path(cache).expanduser() if cache else default_cache_dir(env),
            ranker=env.get("FOURFOLD_RANKER") or "default",
            ranker_optional=_switch(env, "FOURFOLD_RANKER_OPTIONAL", False),
            ranker_device=env.get("FOURFOLD_RANKER_DEVICE") or "cpu",
            max_overtake_s=_number(env, "FOURFOLD_MAX_OVERTAKE_S", 30.0, float),
            max_preemptions=_number(env, "FOURFOLD_MAX_PREEMPTIONS", 2, int),
            trust_max_tokens=_switch(env, "FOURFOLD_TRUST_MAX_TOKENS", True),
            answer_limit=_number(env, "FOURFOLD_ANSWER_LIMIT", 0, int),
            record_lengths=env.get("FOURFOLD_RECORD_LENGTHS", ""),
            record_prompts=_switch(env, "FOURFOLD_RECORD_PROMPTS", False),
        )

    def to_env(self) -> dict[str, str]:
        """The variables that make ``from_env`` return these settings."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            ENVIRONMENT[name][0]: ("1" if value else "0") if isinstance(value, bool) else str(value)
            for name, value in values.items()
        }


def _switch(env: Mapping[str, str], name: str, default: bool) -> bool:
    value = env.get(name, "").strip().lower()
    if value not in ("", "0", "1", "true", "false"):
        raise FourfoldError(f"{name}={value} is neither on nor off", fix=f"set {name}=1 or {name}=0")
    return value in ("1", "true") if value else default


def _number(env: Mapping[str, str], name: str, default: N, kind: Callable[[str], N]) -> N:
    value = env.get(name, "").strip()
    if not value:
        return default
    try:
        number = kind(value)
    except ValueError:
        raise FourfoldError(f"{name}={value} is not a number", fix=f"set it to something like {default}") from None
    if not 0 <= number < float("inf"):
        raise FourfoldError(f"{name}={value} must be a number of at least 0", fix=f"set it to something like {default}")
    return number


AUXILIARY = {"FOURFOLD_EXPECT_GPU", "FOURFOLD_VLLM_TREES"}
"""Names read by the tests only."""
