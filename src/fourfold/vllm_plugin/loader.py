"""What happens right after vLLM has loaded a model's weights: refuse, calibrate or read the cache, check, report.

A model loader is the one public place that holds the whole model in every worker before pages are allotted, under
tensor parallelism too: each rank runs the same forward pass and keeps its own heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from fourfold.config import Settings
from fourfold.errors import FourfoldError
from fourfold.layout import MAX_BLOCK, MIN_BLOCK
from fourfold.quant import files
from fourfold.quant.calibration import Statistics, bias_params
from fourfold.quant.params import LayerParams
from fourfold.quant.text import calibration_windows
from fourfold.vllm_plugin import selfcheck
from fourfold.vllm_plugin.attention import CalibrationMetadata, FourfoldImpl
from fourfold.vllm_plugin.compat import ask_for_page, seam
from fourfold.vllm_plugin.identity import calibration_path, describe

logger = init_logger("vllm.fourfold")


def calibrating(loader: type) -> type:
    """``loader`` with Fourfold's step after ``load_model``; a loader that has it already is returned as it is."""
    if issubclass(loader, _AfterLoad):
        return loader
    return type(loader.__name__, (_AfterLoad, loader), {"__module__": loader.__module__, "__doc__": loader.__doc__})


class _AfterLoad:
    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        refuse(model_config)
        model = super().load_model(vllm_config, model_config, prefix=prefix)  # type: ignore[misc]
        prepare(model, vllm_config, model_config, prefix)
        return model


def refuse(model_config: ModelConfig) -> None:
    """Stop for models whose state is not pages of keys and values per head."""
    reasons = {
        "multi-head latent attention (MLA)": getattr(model_config, "use_mla", False),
        "a hybrid of attention and recurrent state (Mamba and the like)": getattr(model_config, "is_hybrid", False),
        "no attention at all": getattr(model_config, "is_attention_free", False),
        "an encoder and a decoder": getattr(model_config, "is_encoder_decoder", False),
    }
    for what, present in reasons.items():
        if present:
            raise FourfoldError(
                f"{model_config.model} has {what}",
                why="4-bit pages hold one key and one value per token and KV head",
                fix="serve it without Fourfold (FOURFOLD=0)",
            )


_BACKEND_FIX = "pass --attention-backend CUSTOM (`fourfold serve` does), or serve it without Fourfold (FOURFOLD=0)"


def attention_layers(model: nn.Module, prefix: str = "") -> dict[str, Attention]:
    """The model's attention layers; every one must be ours.

    Keys are layer names without ``prefix``: vLLM puts one before a drafter's, and a model's calibration is the same in
    either role.
    """
    layers: dict[str, Attention] = {}
    for name, module in model.named_modules():
        if not isinstance(module, AttentionLayerBase):
            continue
        if not isinstance(module, Attention) or not isinstance(module.impl, FourfoldImpl):
            raise FourfoldError(
                f"layer {name} ({type(module).__name__}) is not served from 4-bit pages",
                why="a model is held in 4-bit pages as a whole or not at all",
                fix=_BACKEND_FIX if seam().device == "cuda" else "serve it without Fourfold (FOURFOLD=0)",
            )
        layers[module.layer_name.removeprefix(f"{prefix}.")] = module
    if not layers:
        raise FourfoldError("the model has no attention layer", fix="serve it without Fourfold (FOURFOLD=0)")
    return layers


def prepare(model: nn.Module, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> None:
    """Give every layer its parameters, check the kernels on this machine, and log the one line."""
    settings = Settings.from_env()
    layers = attention_layers(model, prefix)
    impls: list[FourfoldImpl] = []
    params, origin = parameters(model, layers, vllm_config, model_config, settings)
    for name, layer in layers.items():
        if name not in params:
            raise FourfoldError(
                "the calibration does not cover this model",
                why=f"it has nothing for {name}",
                fix="run `fourfold calibrate` for this model",
            )
        own = files.shard(
            params[name], layer.num_kv_heads, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        )
        problem = own.check(layer.num_kv_heads, layer.head_size, layer.head_size_v)
        if problem:
            raise FourfoldError(f"calibration does not fit {name}", why=problem, fix="calibrate this model again")
        impl = layer.impl
        assert isinstance(impl, FourfoldImpl)  # attention_layers saw to it
        impl.set_params(own.uncentred() if impl.logits_soft_cap else own)
        impls.append(impl)
        ask_for_page(layer)
    # the engine's own page where it is known already: what this compiles is then what serves
    block = vllm_config.cache_config.block_size
    block = block if block and block % 16 == 0 and block <= MAX_BLOCK else MIN_BLOCK
    error = selfcheck.check(impls, model_config.dtype, block)
    logger.info("%s", describe(layers, origin, error, settings, vllm_config))


def parameters(
    model: nn.Module,
    layers: dict[str, Attention],
    vllm_config: VllmConfig,
    model_config: ModelConfig,
    settings: Settings,
) -> tuple[dict[str, LayerParams], str]:
    """Parameters by layer name, and where they come from."""
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    drafting = model_config is not vllm_config.model_config
    if settings.calibration == "none":
        return data_free(model, layers), "none (data-free)"
    if drafting and not _plain_language_model(vllm_config):
        # EAGLE- and MTP-style drafters read the target's hidden states, so they cannot be run on text by themselves.
        return data_free(model, layers), "none (a drafter that reads hidden states)"
    if settings.calibration != "auto" and not drafting:
        loaded, _ = files.load(files.Path(settings.calibration))
        return loaded, settings.calibration
    path = calibration_path(model_config, vllm_config.load_config, settings, rank, ranks)
    if path.is_file():
        loaded, _ = files.load(path)
        return loaded, str(path)
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise FourfoldError(
            "this model is not calibrated yet",
            why="calibration does not run under pipeline parallelism",
            fix="run `fourfold calibrate` once, then pass its file with --calibration",
        )
    made = run(model, layers, vllm_config, model_config, settings)
    metadata = {"model": str(model_config.model), "revision": str(model_config.revision), "ranks": str(ranks)}
    files.save(path, made, metadata)
    return made, f"{path} (made at this start)"


def _plain_language_model(vllm_config: VllmConfig) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method == "draft_model"


def run(
    model: nn.Module,
    layers: dict[str, Attention],
    vllm_config: VllmConfig,
    model_config: ModelConfig,
    settings: Settings,
) -> dict[str, LayerParams]:
    """One uncompiled forward pass per window of the calibration text."""
    from transformers import AutoTokenizer

    tokenizer = None
    if not model_config.skip_tokenizer_init:
        tokenizer = AutoTokenizer.from_pretrained(
            model_config.tokenizer,
            revision=model_config.tokenizer_revision,
            trust_remote_code=model_config.trust_remote_code,
        )
    windows = calibration_windows(
        settings.calibration_text, tokenizer, model_config.get_vocab_size(), model_config.max_model_len
    )
    device = next(model.parameters()).device
    statistics = {
        x.layer_name: Statistics.empty(x.num_kv_heads, x.head_size, x.head_size_v, device) for x in layers.values()
    }
    with torch.inference_mode(), set_current_vllm_config(vllm_config):
        for window in windows:
            metadata = CalibrationMetadata([len(s) for s in window], statistics)
            ids = torch.tensor([t for s in window for t in s], device=device)
            positions = torch.cat([torch.arange(len(s), device=device) for s in window])
            if model_config.uses_mrope:
                positions = positions.expand(3, -1)
            with set_forward_context(
                dict.fromkeys(statistics, metadata),
                vllm_config,
                num_tokens=ids.numel(),
                slot_mapping={},
                skip_compiled=True,
            ):
                model(ids, positions, None, None)
    return {name: statistics[x.layer_name].params() for name, x in layers.items()}


def data_free(model: nn.Module, layers: dict[str, Attention]) -> dict[str, LayerParams]:
    """Rotation, and the key projection's bias as centre."""
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    return {
        name: bias_params(_key_bias(parents.get(id(x)), x), x.num_kv_heads, x.head_size, x.head_size_v)
        for name, x in layers.items()
    }


def _key_bias(block: Any, layer: Attention) -> torch.Tensor | None:
    """[P, HK, D] the key projection's bias after RoPE at 64 positions, or None without a bias."""
    bias = getattr(getattr(block, "qkv_proj", None), "bias", None)
    if bias is None:
        return None
    size = layer.num_kv_heads * layer.head_size
    start = layer.num_heads * layer.head_size
    key = bias.detach()[start : start + size]
    positions = torch.arange(0, 4096, 64, device=key.device)
    keys = key.repeat(len(positions), 1)
    rotary = getattr(block, "rotary_emb", None)
    if rotary is not None:
        _, keys = rotary(positions, torch.zeros_like(keys), keys.clone())
    return keys.view(len(positions), layer.num_kv_heads, layer.head_size)
