"""What the attention backends of all devices share: refusals, parameters, calibration, the check of the page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec

from fourfold.config import Settings
from fourfold.errors import FourfoldError
from fourfold.layout import HEAD_SIZES, MAX_BLOCK, PageLayout
from fourfold.quant.calibration import Statistics
from fourfold.quant.params import LayerParams

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import KVCacheLayout


@dataclass
class CalibrationMetadata:
    """Marks a forward pass over calibration text: every sequence is whole, nothing is stored."""

    lengths: list[int]
    statistics: dict[str, Statistics]


def spec_layout(spec: AttentionSpec) -> PageLayout:
    """The layout that a spec's sizes call for."""
    return PageLayout(spec.block_size, spec.num_kv_heads, spec.head_size, spec.head_size_v)


def check_page(spec: AttentionSpec) -> PageLayout:
    """The layout of ``spec``, after checking that vLLM allots exactly its bytes.

    Raises:
        FourfoldError: the page has another size: the seam is lost.
    """
    layout = spec_layout(spec)
    if spec.page_size_bytes != layout.page_bytes:
        padded = getattr(spec, "page_size_padded", None) is not None
        raise FourfoldError(
            f"vLLM allots pages of {spec.page_size_bytes} bytes where {layout.page_bytes} are needed",
            why="it pads them to another model's or layer's page, of which they are no simple fraction"
            if padded
            else "the seam through which Fourfold asks for its page did not take effect",
            fix="use a drafter with the model's KV heads and head size, or set FOURFOLD=0"
            if padded
            else "run `fourfold doctor`; report the vLLM version",
        )
    return layout


class FourfoldBackend(AttentionBackend):
    """What 4-bit pages hold on every device."""

    # One call per layer transforms, stores and attends.
    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        # vLLM splits a larger --block-size into kernel blocks of the largest size listed that divides it.
        return [*range(MAX_BLOCK, 0, -16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    # Where vLLM asks backends and not layers for the page (``compat.ask_for_page`` is for the others):

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC,)  # one head's part of a page is contiguous

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Ask for PageLayout's bytes instead of two dense rows per token."""
        if spec.state_content_bytes is not None:
            return spec
        content = PageLayout(16, spec.num_kv_heads, spec.head_size, spec.head_size_v).bytes_per_token_head
        return replace(spec, dtype=torch.uint8, state_content_bytes=content)


class FourfoldImpl(AttentionImpl):
    """One attention layer, whatever the device: what it refuses, its quantiser, and how it is calibrated."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **extra: Any,
    ) -> None:
        refuse = {
            "ALiBi slopes": alibi_slopes is not None,
            "learned attention sinks": sinks is not None,
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            f"--kv-cache-dtype {kv_cache_dtype}": kv_cache_dtype not in ("auto", "bfloat16", "float16"),
            f"unknown attention options {sorted(k for k, v in extra.items() if v)}": any(extra.values()),
        }
        for what, present in refuse.items():
            if present:
                raise FourfoldError(
                    f"4-bit pages do not support {what}",
                    why="the layer would be computed wrongly",
                    fix="serve this model, or with these flags, without Fourfold (FOURFOLD=0)",
                )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window, self.logits_soft_cap = sliding_window, logits_soft_cap
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.settings = Settings.from_env()
        self.params: LayerParams | None = None

    def set_params(self, params: LayerParams) -> None:
        """Give the layer its quantiser; kernel objects are made when the page is known."""
        self.params = params

    def required_params(self) -> LayerParams:
        """The layer's quantiser.

        Raises:
            FourfoldError: it was never given one.
        """
        if self.params is None:
            raise FourfoldError(
                "a layer has no quantiser parameters",
                why="the model was not loaded through one of vLLM's registered load formats",
                fix="use a --load-format that `fourfold doctor` lists",
            )
        return self.params

    def check_cache(self, layer: Attention, cache: torch.Tensor) -> PageLayout:
        """Layout of the cache that vLLM allotted, [pages, HK, block, bytes] uint8.

        Raises:
            FourfoldError: its shape, dtype or strides are not PageLayout's.
        """
        pages, heads, block, _ = cache.shape
        layout = PageLayout(block, heads, self.head_size, layer.head_size_v)
        expected = (layout.page_bytes, layout.head_page_bytes, layout.bytes_per_token_head, 1)
        if cache.dtype != torch.uint8 or heads != self.num_kv_heads or cache.stride() != expected:
            raise FourfoldError(
                f"vLLM allotted a cache of shape {tuple(cache.shape)}, {cache.dtype}, strides {cache.stride()}",
                why=f"4-bit pages need [{pages}, {self.num_kv_heads}, {block}, {layout.bytes_per_token_head}] uint8 "
                f"with strides {expected}",
                fix="run `fourfold doctor`; report the vLLM version",
            )
        return layout

    def last_token(
        self,
        layout: PageLayout,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
    ) -> list[torch.Tensor]:
        """For the self-check: store a whole sequence, then attend with its last token's query, from pages alone.

        Args:
            query: [T, H, D]; key: [T, HK, D]; value: [T, HK, Dv], all on the CPU.
            cache: [pages, HK, head_page_bytes] uint8 on the CPU, filled on return.
            table: [1, pages] int32; slots: [T] int64.

        Returns:
            [1, H, Dv] on the CPU, once for each path that the engine can take.
        """
        raise NotImplementedError

    def calibrate(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: CalibrationMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Plain attention of whole sequences in float32, counting what passes."""
        if self.kv_sharing_target_layer_name is not None:
            raise FourfoldError(
                "models whose layers share a KV cache cannot be calibrated yet",
                why="the sharing layers do not receive the keys they attend to",
                fix="pass --calibration none, or set FOURFOLD=0",
            )
        statistics = metadata.statistics[layer.layer_name]
        start = 0
        for length in metadata.lengths:
            q, k, v = (x[start : start + length] for x in (query, key, value))
            statistics.add(q, k, v)
            bias = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
            if self.sliding_window:
                bias &= ~torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-self.sliding_window)
            scores = torch.einsum(
                "qhgd,khd->hgqk", q.float().unflatten(1, (self.num_kv_heads, -1)), k.float() * self.scale
            )
            if self.logits_soft_cap:
                scores = torch.tanh(scores / self.logits_soft_cap) * self.logits_soft_cap
            weights = scores.masked_fill(~bias, -torch.inf).softmax(-1)
            out = torch.einsum("hgqk,khd->qhgd", weights, v.float()).flatten(1, 2)
            output[start : start + length] = out.to(output.dtype)
            start += length
        return output
