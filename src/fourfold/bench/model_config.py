"""What a model's ``config.json`` says about its KV cache, without loading the model or importing vLLM."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.errors import FourfoldError

_STATE_LAYERS = {"linear_attention", "mamba", "mamba2", "recurrent", "ssm", "conv", "hybrid_mamba", "gated_delta_net"}
_STATE_KEYS = (
    "mamba_d_state",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
    "attn_layer_period",
    "linear_num_value_heads",
)
_STATE_TYPES = {"mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "bamba", "zamba2", "nemotron_h", "recurrent_gemma"}
# Families that alternate full and sliding layers without writing layer_types: every n-th layer is full.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gpt_oss": 2}
_DEFAULT_HEAD = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "gemma3": 256, "qwen3": 128, "qwen3_moe": 128}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers that decide how many bytes a token takes.

    Attributes:
        layers: attention layers.
        kv_heads: KV heads of the whole model, before tensor parallelism.
        head_size, head_size_v: elements of a key and of a value.
        sliding_layers: how many of ``layers`` see a window only.
        window: tokens of that window, or 0.
        latent: elements kept per token and layer by multi-head latent attention, or 0.
        unsupported: why no mode can be computed at all (recurrent state, encoder-decoder), or "".
        max_len: the context length of the model.
    """

    layers: int
    kv_heads: int
    head_size: int
    head_size_v: int
    sliding_layers: int = 0
    window: int = 0
    latent: int = 0
    unsupported: str = ""
    max_len: int = 0

    def kv_heads_per_rank(self, tensor_parallel: int) -> int:
        """KV heads that one rank keeps; heads are replicated where there are fewer than ranks."""
        if self.kv_heads >= tensor_parallel and self.kv_heads % tensor_parallel:
            raise FourfoldError(
                f"{self.kv_heads} KV heads cannot be split over {tensor_parallel} ranks",
                fix="choose a --tensor-parallel-size that divides the number of KV heads",
            )
        return max(1, self.kv_heads // tensor_parallel)


def find_config(model: str) -> Path:
    """The config.json of a local directory or of a model on the Hugging Face hub.

    Raises:
        FourfoldError: when there is none, or when the hub cannot be reached.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        path = directory / "config.json"
        if not path.is_file():
            raise FourfoldError(f"{model} has no config.json", fix="pass the directory of a Hugging Face model")
        return path
    if directory.suffix == ".json" and directory.is_file():
        return directory
    if model.startswith(("/", "./", "../", "~")):
        raise FourfoldError(f"there is no directory {model}", fix="pass a model's directory or its name on the hub")
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # the hub client raises many unrelated types; each means that there is no file
        raise FourfoldError(
            f"the configuration of {model} was not found",
            why=f"no such directory, and the hub answered: {(str(error).splitlines() or [type(error).__name__])[0]}",
            fix="pass a local directory, or check the name and the network",
        ) from error


def read_shape(path: Path) -> ModelShape:
    """Read a config.json.

    Raises:
        FourfoldError: when it is not JSON or lacks the numbers that every transformer has.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise FourfoldError(f"{path.name} cannot be read", why=str(error)) from error
    if not isinstance(config, dict):
        raise FourfoldError(f"{path.name} is not a model configuration", why="it is not a JSON object")
    return shape_from_config(config)


def shape_from_config(config: dict[str, Any]) -> ModelShape:
    """``ModelShape`` of a parsed configuration (see ``read_shape``)."""
    outer = config
    text = config.get("text_config") or config.get("llm_config") or config
    kind = str(text.get("model_type", outer.get("model_type", "")))

    def first(*names: str) -> Any:
        return next((text[name] for name in names if text.get(name) is not None), None)

    layers, heads, hidden = (
        first("num_hidden_layers", "n_layer", "num_layers"),
        first("num_attention_heads", "n_head", "num_heads"),
        first("hidden_size", "n_embd", "d_model"),
    )
    reason = _why_unsupported(outer, text, kind)
    if reason and not (layers and heads):
        return ModelShape(int(layers or 1), 1, 64, 64, unsupported=reason)
    if not layers or not heads:
        raise FourfoldError(
            "this config.json does not describe a transformer",
            why="it has no number of layers or of attention heads",
            fix="pass the directory of a decoder model",
        )
    kv_heads = first("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        kv_heads = 1
    head_size = first("head_dim", "attention_head_dim") or _DEFAULT_HEAD.get(kind)
    if not head_size:
        if not hidden:
            raise FourfoldError("this config.json gives neither head_dim nor hidden_size")
        head_size = int(hidden) // int(heads)
    latent = int(first("kv_lora_rank") or 0)
    sliding, window = _sliding(text, kind, int(layers))
    return ModelShape(
        layers=int(layers),
        kv_heads=int(kv_heads or heads),
        head_size=int(head_size),
        head_size_v=int(first("v_head_dim") or head_size) if not latent else int(head_size),
        sliding_layers=sliding,
        window=window,
        latent=latent + int(first("qk_rope_head_dim") or 0) if latent else 0,
        unsupported=reason,
        max_len=int(first("max_position_embeddings", "n_positions", "max_seq_len") or 0),
    )


def _why_unsupported(outer: dict[str, Any], text: dict[str, Any], kind: str) -> str:
    if outer.get("is_encoder_decoder"):
        return "encoder-decoder models keep a second cache for cross-attention"
    layer_types = [str(t) for t in text.get("layer_types") or text.get("layers_block_type") or []]
    if (
        kind in _STATE_TYPES
        or any(t in _STATE_LAYERS for t in layer_types)
        or any(text.get(key) is not None for key in _STATE_KEYS)
    ):
        return "layers with a recurrent state (Mamba, linear attention) share the pool, and vLLM pads pages to fit it"
    return ""


def _sliding(text: dict[str, Any], kind: str, layers: int) -> tuple[int, int]:
    """Number of sliding-window layers and the window in tokens."""
    window = int(text.get("sliding_window") or 0)
    if not window or text.get("use_sliding_window") is False:
        return 0, 0
    layer_types = text.get("layer_types")
    if layer_types:
        count = sum("sliding" in str(t) for t in layer_types)
    elif kind in _FULL_EVERY or text.get("sliding_window_pattern"):
        every = int(text.get("sliding_window_pattern") or _FULL_EVERY[kind])
        count = layers - layers // every
    elif text.get("max_window_layers") is not None:
        count = max(0, layers - int(text["max_window_layers"]))
    else:
        count = layers
    return count, window if count else 0
