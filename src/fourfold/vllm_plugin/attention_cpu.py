"""Attention backend for vLLM's CPU engine: the metadata and one kernel call per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from fourfold.kernels.cpu.attention import CpuLayer
from fourfold.layout import PageLayout
from fourfold.quant.params import LayerParams
from fourfold.vllm_plugin.attention import CalibrationMetadata, FourfoldBackend, FourfoldImpl, check_page

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention


class CpuBackend(FourfoldBackend):
    """4-bit pages.  Registered over CPU_ATTN, so it must carry that name."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[CpuImpl]:
        return CpuImpl

    @staticmethod
    def get_builder_cls() -> type[CpuBuilder]:
        return CpuBuilder


@dataclass
class CpuMetadata:
    """What a forward pass of one KV-cache group needs; all tensors on the CPU."""

    num_actual_tokens: int
    query_start: torch.Tensor  # [S + 1] int32
    seq_lens: torch.Tensor  # [S] int32
    block_table: torch.Tensor  # [S, N] int32
    slots: torch.Tensor  # [T] int64
    causal: bool


class CpuBuilder(AttentionMetadataBuilder[CpuMetadata]):
    """Passes vLLM's metadata on, after checking that the page it allots is the one we asked for."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        check_page(kv_cache_spec)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CpuMetadata:
        m = common_attn_metadata
        return CpuMetadata(
            num_actual_tokens=m.num_actual_tokens,
            query_start=m.query_start_loc,
            seq_lens=m.seq_lens,
            block_table=m.block_table_tensor,
            slots=m.slot_mapping,
            causal=bool(m.causal),
        )


class CpuImpl(FourfoldImpl):
    """One attention layer: transform, store and attend in one call."""

    _layer: CpuLayer | None = None

    def set_params(self, params: LayerParams) -> None:
        """Give the layer its quantiser; the kernel object is made when the page is known."""
        super().set_params(params)
        self._layer = None

    def kernel(self, layout: PageLayout) -> CpuLayer:
        """The kernel object for pages of ``layout``."""
        return CpuLayer(
            layout,
            self.num_heads,
            self.scale,
            self.required_params(),
            soft_cap=self.logits_soft_cap or 0.0,
            window=self.sliding_window or 0,
            raw=self.settings.prefill == "raw",
        )

    def _bind(self, layer: Attention, cache: torch.Tensor) -> CpuLayer:
        self._layer = self.kernel(self.check_cache(layer, cache))
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
            return self.calibrate(layer, query, key, value, attn_metadata, output)
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
        """See ``FourfoldImpl.last_token``."""
        lengths = torch.tensor([len(key)], dtype=torch.int32)
        output = torch.full((1, self.num_heads, layout.head_size_v), float("nan"), dtype=query.dtype)
        kernel = self.kernel(layout)
        kernel.store(key, value, cache, slots, torch.tensor([0, len(key)], dtype=torch.int32), lengths)
        one = torch.tensor([0, 1], dtype=torch.int32)
        kernel.attend(
            query[-1:], None, None, cache, output, query_start=one, seq_lens=lengths, block_table=table, slots=None
        )
        return [output]
