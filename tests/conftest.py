"""Shared fixtures: a private cache folder, so that tests neither read nor leave calibrations of the user's."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# One folder for the whole run: the C++ kernels are compiled once, not once per test.
_CACHE = Path(tempfile.gettempdir()) / f"fourfold-tests-{os.getuid()}"
os.environ.setdefault("FOURFOLD_CACHE_DIR", str(_CACHE))
