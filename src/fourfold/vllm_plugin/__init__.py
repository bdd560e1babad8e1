"""The vLLM plugin.  This folder (and the measurements that start an engine) is the only place that imports vLLM."""

from __future__ import annotations

import os


def register() -> None:
    """Entry point ``vllm.general_plugins``: runs in every vLLM process, must be cheap and may run twice.

    Does nothing, and imports nothing, unless FOURFOLD=1.
    """
    if os.environ.get("FOURFOLD", "0").strip().lower() in ("", "0", "false"):
        return
    from fourfold.config import Settings

    settings = Settings.from_env()
    if settings.enabled:
        from fourfold.vllm_plugin.compat import install

        install()
