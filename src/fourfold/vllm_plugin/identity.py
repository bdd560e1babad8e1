"""Where a model's calibration is kept, and the line that says how the engine runs."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold import __version__
from fourfold.config import Settings
from fourfold.layout import PageLayout
from fourfold.modes import UNPROVEN
from fourfold.quant.files import FORMAT
from fourfold.quant.text import text_digest
from fourfold.vllm_plugin.compat import seam

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.model_executor.layers.attention import Attention


def calibration_path(
    model_config: ModelConfig, load_config: LoadConfig, settings: Settings, rank: int, ranks: int
) -> Path:
    """``<cache>/calibrations/<model>-<digest>/rank<r>of<n>.safetensors``.

    The digest covers what the statistics depend on: model, revision, weights (for a local folder: names, sizes and
    times), configuration, quantisation, calibration text and the file format.
    """
    model = str(model_config.model)
    folder = Path(model)
    weights = []
    if folder.is_dir():
        for file in sorted(folder.iterdir()):
            if file.suffix in (".safetensors", ".bin", ".gguf", ".pt", ".json"):
                stat = file.stat()
                weights.append((file.name, stat.st_size, stat.st_mtime_ns))
    facts = {
        "model": str(folder.resolve()) if folder.is_dir() else model,
        "revision": str(model_config.revision),
        "weights": weights,
        "config": _configuration(model_config.hf_config),
        "quantization": str(model_config.quantization),
        "load_format": str(load_config.load_format),
        "text": text_digest(settings.calibration_text),
        "format": FORMAT,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name if folder.is_dir() else model).strip("-")
    return settings.cache_dir / "calibrations" / f"{name}-{digest}" / f"rank{rank}of{ranks}.safetensors"


def _configuration(config: Any) -> dict[str, Any]:
    """What of a model's configuration its statistics depend on: not the dtype it is served in, nor where it lies."""
    left_out = ("dtype", "torch_dtype", "_name_or_path", "transformers_version")
    return {key: value for key, value in json.loads(config.to_json_string()).items() if key not in left_out}


def describe(
    layers: dict[str, Attention], origin: str, error: float, settings: Settings, vllm_config: VllmConfig
) -> str:
    """The one line an operator reads: seam, bytes per token, ratio, calibration, self-check, changed settings."""
    per_token = 0
    dense = 0
    element = vllm_config.model_config.dtype.itemsize
    for layer in layers.values():
        if layer.kv_sharing_target_layer_name is None:
            layout = PageLayout(16, layer.num_kv_heads, layer.head_size, layer.head_size_v)
            per_token += layout.bytes_per_token
            dense += layer.num_kv_heads * (layer.head_size + layer.head_size_v) * element
    here = seam()
    doubt = f", {UNPROVEN[here.name]}" if here.name in UNPROVEN else ""
    block = vllm_config.cache_config.block_size
    changed = "none" if block <= 128 else f"--block-size {block} is split into kernel blocks of 128 or less"
    return (
        f"Fourfold {__version__}: {here.package} {here.vllm} through seam {here.name} ({here.device}{doubt}); "
        f"{len(layers)} layers at {per_token} bytes a token on this rank, "
        f"{dense / per_token:.2f} times fewer than {str(vllm_config.model_config.dtype).removeprefix('torch.')}; "
        f"calibration {origin}; prefill {settings.prefill}; self-check error {error:.1e}; settings changed: {changed}"
    )
