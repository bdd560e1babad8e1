"""``python -m fourfold.vllm_plugin.warm MODEL``: do now what an engine's first start does once and keeps.

The CPU kernels are compiled, and vLLM looks at the model's class (in a process that imports vLLM again) and remembers
what it saw.  Both land in the user's caches.
"""

from __future__ import annotations

import sys

from vllm.config import ModelConfig

from fourfold.kernels.cpu.binding import library


def warm(model: str) -> None:
    """Fill both caches for a model's directory or name."""
    library()
    ModelConfig(model=model)


if __name__ == "__main__":
    warm(sys.argv[1])
