"""Attention backend for vLLM's CPU engine (seam B): the page, the metadata and one kernel call per layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from fourfold.config import Settings
from fourfold.errors import FourfoldError
from fourfold.kernels.cpu.attention import CpuLayer
from fourfold.layout import HEAD_SIZES, MAX_BLOCK, PageLayout
from fourfold.quant.calibration import Statistics
from fourfold.quant.params import LayerParams

logger = init_logger("vllm.fourfold")


class FourfoldBackend(AttentionBackend):
    """4-bit pages.  Registered over CPU_ATTN, so it must carry that name."""

    # One call per layer transforms, stores and attends.
    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[FourfoldImpl]:
        return FourfoldImpl

    @staticmethod
    def get_builder_cls() -> type[FourfoldBuilder]:
        return FourfoldBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        # vLLM splits a larger --block-size into kernel blocks of the largest size listed that divides it.
        return [*range(MAX_BLOCK, 0, -16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # one head's part of a page is contiguous

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Ask for PageLayout's bytes instead of two dense rows per token."""
        if spec.state_content_bytes is not None:
            return spec
        content = PageLayout(16, spec.num_kv_heads, spec.head_size, spec.head_size_v).bytes_per_token_head
        return replace(spec, dtype=torch.uint8, state_content_bytes=content)


@dataclass
class FourfoldMetadata:
    """What a forward pass of one KV-cache group needs; all tensors on the CPU."""

    num_actual_tokens: int
    query_start: torch.Tensor  # [S + 1] int32
    seq_lens: torch.Tensor  # [S] int32
    block_table: torch.Tensor  # [S, N] int32
    slots: torch.Tensor  # [T] int64
    causal: bool


@dataclass
class CalibrationMetadata:
    """Marks a forward pass over calibration text: every sequence is whole, nothing is stored."""

    lengths: list[int]
    statistics: dict[str, Statistics]


class FourfoldBuilder(AttentionMetadataBuilder[FourfoldMetadata]):
    """Passes vLLM's metadata on, after checking that the page it allots is the one we asked for."""

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layout = spec_layout(kv_cache_spec)
        if kv_cache_spec.page_size_bytes != layout.page_bytes:
            raise FourfoldError(
                f"vLLM allots pages of {kv_cache_spec.page_size_bytes} bytes where {layout.page_bytes} are needed",
                why="the seam through which Fourfold asks for its page did not take effect",
                fix="run `fourfold doctor`; report the vLLM version",
            )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FourfoldMetadata:
        m = common_attn_metadata
        return FourfoldMetadata(
            num_actual_tokens=m.num_actual_tokens,
            query_start=m.query_start_loc,
            seq_lens=m.seq_lens,
            block_table=m.block_table_tensor,
            slots=m.slot_mapping,
            causal=bool(m.causal),
        )


def spec_layout(spec: AttentionSpec) -> PageLayout:
    """The layout that a spec's sizes call for."""
    return PageLayout(spec.block_size, spec.num_kv_heads, spec.head_size, spec.head_size_v)


class FourfoldImpl(AttentionImpl):
    """One attention layer."""

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
        self._layer: CpuLayer | None = None

    def set_params(self, params: LayerParams) -> None:
        """Give the layer its quantiser; the kernel object is made when the page is known."""
        self.params, self._layer = params, None

    def kernel(self, layout: PageLayout) -> CpuLayer:
        """The kernel object for pages of ``layout``."""
        if self.params is None:
            raise FourfoldError(
                "a layer has no quantiser parameters",
                why="the model was not loaded through one of vLLM's registered load formats",
                fix="use a --load-format that `fourfold doctor` lists",
            )
        return CpuLayer(
            layout,
            self.num_heads,
            self.scale,
            self.params,
            soft_cap=self.logits_soft_cap or 0.0,
            window=self.sliding_window or 0,
            raw=self.settings.prefill == "raw",
        )

    def _bind(self, layer: Any, cache: torch.Tensor) -> CpuLayer:
        """Check the cache that vLLM allotted against PageLayout, once."""
        head_size_v = getattr(layer, "head_size_v", self.head_size)
        pages, heads, block, _ = cache.shape
        layout = PageLayout(block, heads, self.head_size, head_size_v)
        expected = (layout.page_bytes, layout.head_page_bytes, layout.bytes_per_token_head, 1)
        if cache.dtype != torch.uint8 or heads != self.num_kv_heads or cache.stride() != expected:
            raise FourfoldError(
                f"vLLM allotted a cache of shape {tuple(cache.shape)}, {cache.dtype}, strides {cache.stride()}",
                why=f"4-bit pages need [{pages}, {self.num_kv_heads}, {block}, {layout.bytes_per_token_head}] uint8 "
                f"with strides {expected}",
                fix="run `fourfold doctor`; report the vLLM version",
            )
        self._layer = self.kernel(layout)
        return self._layer

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [T, H, D], key [T, HK, D], value [T, HK, Dv] -> output [T, H, Dv], written in place."""
        if attn_metadata is None:  # profiling run
            return output
        if isinstance(attn_metadata, CalibrationMetadata):
            return self._calibrate(layer, query, key, value, attn_metadata, output)
        kernel = self._layer or self._bind(layer, kv_cache)
        shared = self.kv_sharing_target_layer_name is not None
        n = attn_metadata.num_actual_tokens
        kernel.attend(
            query[:n],
            None if shared else key[:n],
            None if shared else value[:n],
            kv_cache,
            output[:n],
            query_start=attn_metadata.query_start,
            seq_lens=attn_metadata.seq_lens,
            block_table=attn_metadata.block_table,
            slots=None if shared else attn_metadata.slots,
            causal=attn_metadata.causal,
        )
        return output

    def _calibrate(
        self,
        layer: Any,
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
            bias = torch.ones(length, length, dtype=torch.bool).tril()
            if self.sliding_window:
                bias &= ~torch.ones(length, length, dtype=torch.bool).tril(-self.sliding_window)
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
