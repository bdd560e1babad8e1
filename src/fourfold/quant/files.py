"""Calibration files: safetensors, one per model, revision and rank; whole or absent."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fourfold.errors import FourfoldError
from fourfold.files import write_atomically
from fourfold.quant.params import LayerParams

FORMAT = "fourfold-calibration-2"
_FIELDS = tuple(f.name for f in fields(LayerParams))


def save(path: Path, layers: dict[str, LayerParams], metadata: dict[str, str]) -> Path:
    """Write the layers' parameters; keys are ``<layer name>/<field>``."""
    tensors = {f"{layer}/{name}": getattr(params, name) for layer, params in layers.items() for name in _FIELDS}

    def write(temporary: Path) -> None:
        save_file(tensors, temporary, metadata={**metadata, "format": FORMAT})

    return write_atomically(path, write)


def load(path: Path) -> tuple[dict[str, LayerParams], dict[str, str]]:
    """Read a file that ``save`` wrote.

    Raises:
        FourfoldError: missing, unreadable, cut off, of another format, or lacking a field.
    """
    fix = "delete the file to calibrate again, or pass another one"
    if not path.is_file():
        raise FourfoldError(f"calibration file {path} does not exist", fix="run `fourfold calibrate MODEL`")
    layers: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise FourfoldError(
                    f"{path} is not a calibration file of this version",
                    why=f"its format is {metadata.get('format', 'not given')}, not {FORMAT}",
                    fix=fix,
                )
            for key in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                layer, _, name = key.rpartition("/")
                layers.setdefault(layer, {})[name] = file.get_tensor(key)
    except (SafetensorError, OSError, ValueError) as error:
        raise FourfoldError(f"calibration file {path} cannot be read", why=str(error), fix=fix) from error
    result = {}
    for layer, tensors in layers.items():
        missing = set(_FIELDS) - set(tensors)
        if missing:
            raise FourfoldError(
                f"calibration file {path} is incomplete", why=f"{layer} lacks {', '.join(sorted(missing))}", fix=fix
            )
        result[layer] = LayerParams(**{name: tensors[name].to(torch.float32).contiguous() for name in _FIELDS})
    return result, metadata


def shard(params: LayerParams, kv_heads: int, rank: int, ranks: int) -> LayerParams:
    """This rank's heads of parameters that hold all of a model's, as vLLM splits or repeats them.

    Args:
        kv_heads: KV heads on this rank; rank, ranks: tensor-parallel rank and size.
    """
    total = params.kv_heads
    if total == kv_heads:
        return params
    start = rank * kv_heads if total >= ranks else rank * total // ranks
    keep = slice(start, start + kv_heads)
    return LayerParams(
        **{name: getattr(params, name)[keep] if getattr(params, name).numel() else torch.zeros(0) for name in _FIELDS}
    )
