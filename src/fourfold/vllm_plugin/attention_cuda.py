"""Attention backend for vLLM on NVIDIA GPUs: one attention layer.

Decodes and drafts run in the CUDA kernels, prompt chunks in FlashAttention over expanded pages, and everything in the
Triton kernels where activations are float32.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from fourfold.errors import FourfoldError
from fourfold.kernels.cuda.decode import Cut, Decode
from fourfold.kernels.cuda.pack import PackedParams, pack_params
from fourfold.kernels.cuda.prefill import COMPUTE, Prefill, plan_prefill, workspace_tokens
from fourfold.kernels.cuda.store import store
from fourfold.layout import PageLayout
from fourfold.quant.params import LayerParams
from fourfold.vllm_plugin.attention import CalibrationMetadata, FourfoldBackend, FourfoldImpl
from fourfold.vllm_plugin.metadata_cuda import SHORT_TOKENS, CudaBuilder, CudaMetadata

MAX_GROUP = 16
"""Query heads per KV head that the kernels are tested with."""


class CudaBackend(FourfoldBackend):
    """4-bit pages, as ``--attention-backend CUSTOM``."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CudaImpl]:
        return CudaImpl

    @staticmethod
    def get_builder_cls() -> type[CudaBuilder]:
        return CudaBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[blocks, KV heads, tokens, bytes] of uint8: one head's part of a page is contiguous.

        Asked for only where layers ask for the page; elsewhere vLLM derives it from what the backend asked for.
        """
        layout = PageLayout(block_size, num_kv_heads, head_size, head_size)
        return (num_blocks, num_kv_heads, block_size, layout.bytes_per_token_head)

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return bool(capability >= DeviceCapability(8, 0))

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # a step is cut by what the CPU knows of its queries' lengths


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    max_query: int,
    max_key: int,
    causal: bool,
    scale: float,
    window: int,
    soft_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's FlashAttention as ``kernels.cuda.prefill.Attention``."""
    out, lse = flash_attn_varlen_func(
        q=query,
        k=key,
        v=value,
        max_seqlen_q=max_query,
        cu_seqlens_q=query_start,
        max_seqlen_k=max_key,
        cu_seqlens_k=key_start,
        softmax_scale=scale,
        causal=causal,
        window_size=[window - 1, 0] if window else None,
        softcap=soft_cap,
        return_softmax_lse=True,
        fa_version=_flash_version(query.shape[-1]),
    )
    return out, lse


@functools.cache
def _flash_version(head_size: int) -> int:
    version = get_flash_attn_version(head_size=head_size)
    if version is None:
        raise FourfoldError(
            f"vLLM has no FlashAttention for heads of {head_size} on this GPU",
            why="prompt chunks are attended by it",
            fix="install a vLLM that has it, or set FOURFOLD=0",
        )
    return int(version)


@functools.cache
def decode_kernel(
    layout: PageLayout,
    heads: int,
    scale: float,
    dtype: torch.dtype,
    device: torch.device,
    soft_cap: float,
    window: int,
) -> Decode:
    """One ``Decode`` for all layers of a shape."""
    return Decode(layout, heads, scale=scale, dtype=dtype, device=device, soft_cap=soft_cap, window=window)


class CudaImpl(FourfoldImpl):
    """One attention layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.num_heads > MAX_GROUP * self.num_kv_heads:
            raise FourfoldError(
                f"{self.num_heads // self.num_kv_heads} query heads share a KV head",
                why=f"the CUDA kernels are made for at most {MAX_GROUP}",
                fix="serve this model without Fourfold (FOURFOLD=0)",
            )
        config = get_current_vllm_config()
        scheduler, speculative = config.scheduler_config, config.speculative_config
        drafts = (speculative.num_speculative_tokens or 0) if speculative is not None else 0
        self.max_queries = 1 + 2 * drafts if speculative is not None and speculative.parallel_drafting else 1 + drafts
        self.max_sequences = scheduler.max_num_seqs
        self.window, self.soft_cap = self.sliding_window or 0, self.logits_soft_cap or 0.0
        self.raw = self.settings.prefill == "raw"
        self.workspace_rows = workspace_tokens(
            scheduler.max_num_batched_tokens, config.model_config.max_model_len, self.window
        )
        self.captured = config.compilation_config.max_cudagraph_capture_size or 0
        self.dtype, self.device = torch.get_default_dtype(), torch.device("cuda", torch.cuda.current_device())
        self._layout: PageLayout | None = None
        self._packed: PackedParams | None = None
        self._prefill: Prefill | None = None
        self._float32: Any = None

    def decode(self, layout: PageLayout) -> Decode:
        """The decode kernels for pages of ``layout``."""
        return decode_kernel(layout, self.num_heads, self.scale, self.dtype, self.device, self.soft_cap, self.window)

    @property
    def sink(self) -> bool:
        """Whether position 0 has its own centre."""
        return self._packed is not None and self._packed.sink

    def set_params(self, params: LayerParams) -> None:
        """Give the layer its quantiser, and the GPU its copies: before vLLM measures what is left for the pool."""
        if params.head_size_v != self.head_size:
            raise FourfoldError(
                f"a layer has keys of {self.head_size} and values of {params.head_size_v} elements",
                why="the CUDA backend handles pages of one size only",
                fix="serve this model without Fourfold (FOURFOLD=0)",
            )
        super().set_params(params)
        if self.dtype == torch.float32:
            from fourfold.kernels.triton.params import TritonParams

            self._float32 = TritonParams.of(params, self.device)
            return
        self._packed = pack_params(params, self.dtype, self.device)
        self._prefill = Prefill(
            params, self.num_heads, flash_attention, self.device,
            scale=self.scale, soft_cap=self.soft_cap, window=self.window,
        )  # fmt: skip

    def cuts(self, decode: Decode) -> list[Cut]:
        """The largest cuts of every kind that steps can have, and the smallest, which is for few sequences."""
        most = self.max_sequences
        decodes = [(batch, batch * n, n, n) for n in range(1, self.max_queries + 1) for batch in (1, most)]
        rows = most * self.max_queries + SHORT_TOKENS
        mixed = [(min(rows, most), rows), (1, 1), (min(self.captured, most), self.captured)]
        return [
            *(decode.cut(*shape) for shape in decodes),
            *(decode.cut(batch, tokens, usual=self.max_queries) for batch, tokens in mixed if batch),
        ]

    def reserve(self) -> None:
        """Take the most workspace that any step will: graphs keep its address, so it must not grow later."""
        if self.dtype == torch.float32:
            return
        layout = PageLayout(16, self.num_kv_heads, self.head_size, self.head_size)
        decode = self.decode(layout)
        most = max(map(decode.scratch_bytes, self.cuts(decode)))
        _workspace(((most,), torch.uint8), device=self.device)
        rows = (self.workspace_rows, self.num_kv_heads, self.head_size)
        _workspace((rows, COMPUTE), (rows, COMPUTE), device=self.device)

    def _profile(self, query: torch.Tensor) -> None:
        """In the profiling run: use the most memory that any step will, so that vLLM leaves it out of the pool."""
        self.reserve()
        # a chunk's transformed queries, dense outputs and their float32 rotation
        parts = [torch.empty(query.numel(), dtype=d, device=query.device) for d in (COMPUTE, COMPUTE, COMPUTE)]
        parts.append(torch.empty(query.numel(), dtype=torch.float32, device=query.device))

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
        """query [T, H, D], key [T, HK, D], value [T, HK, D] -> output [T, H, D], written in place."""
        if output_scale is not None or output_block_scale is not None:
            raise FourfoldError(
                "4-bit pages do not support outputs that attention itself quantises",
                fix='pass --compilation-config \'{"pass_config": {"fuse_attn_quant": false}}\', or set FOURFOLD=0',
            )
        if attn_metadata is None:
            self._profile(query)
            return output.fill_(0)
        if isinstance(attn_metadata, CalibrationMetadata):
            return self.calibrate(layer, query, key, value, attn_metadata, output)
        if self._layout is None:
            self.required_params()
            self._layout = self.check_cache(layer, kv_cache)
        shared = self.kv_sharing_target_layer_name is not None
        self._run(self._layout, query, key, value, kv_cache, attn_metadata, output, stores=not shared)
        return output

    def _run(
        self,
        layout: PageLayout,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        m: CudaMetadata,
        output: torch.Tensor,
        *,
        stores: bool,
    ) -> None:
        if self._float32 is not None:
            from fourfold.kernels.triton.decode import attend
            from fourfold.kernels.triton.store import store as store_float32

            if stores:
                store_float32(key, value, cache, m.slots, m.positions, layout, self._float32)
            n = m.num_tokens
            output[:n] = attend(
                query[:n], cache, m.block_table, m.lengths, m.query_start, m.max_query, layout, self._float32,
                scale=self.scale, soft_cap=self.soft_cap, window=self.window,
            )  # fmt: skip
            return
        assert self._packed is not None
        assert self._prefill is not None
        if stores:
            store(key, value, cache, m.slots, m.positions, layout, self._packed)
        if m.rows:
            decode, plan = self.decode(layout), m.plans[self.window]
            space = m.space.get(decode)
            if space is None:
                size = (decode.scratch_bytes(plan.cut),)
                space = m.space[decode] = _workspace((size, torch.uint8), device=self.device)
            decode(
                query[: m.rows], cache, m.block_table, plan, self._packed, output[: m.rows], space[0],
                after_store=stores,
            )  # fmt: skip
        pieces = m.pieces.get(self.window)
        if pieces:
            dense = m.space.get(self.window)
            if dense is None:
                rows = max((piece.keys for piece in pieces if not piece.raw), default=1)
                shape = (rows, self.num_kv_heads, self.head_size)
                dense = m.space[self.window] = _workspace((shape, COMPUTE), (shape, COMPUTE), device=self.device)
            self._prefill(query, key, value, cache, m.block_table, m.lengths, pieces, layout, output, dense)

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
        """See ``FourfoldImpl.last_token``: as the end of a chunk in either path, and as a decode."""
        device, tokens = self.device, len(key)
        q, k, v, pages, slot, blocks = (x.to(device) for x in (query, key, value, cache, slots, table))
        lengths = torch.tensor([tokens], dtype=torch.int32, device=device)
        outputs = []
        for path in ("dense chunk", "short chunk", "decode"):
            n = 1 if path == "decode" else tokens
            start = torch.tensor([0, n], dtype=torch.int32, device=device)
            metadata = CudaMetadata(
                num_tokens=n, max_query=n, lengths=lengths, query_start=start, block_table=blocks,
                slots=slot[-n:], positions=torch.arange(tokens - n, tokens, device=device),
            )  # fmt: skip
            if self.dtype != torch.float32:
                if path == "dense chunk":
                    metadata.pieces[self.window] = plan_prefill(
                        [tokens], [tokens], first_sequence=0, first_row=0, workspace=self.workspace_rows,
                        window=self.window, raw=False, device=device,
                    )  # fmt: skip
                else:
                    decode = self.decode(layout)
                    metadata.rows, cut = n, decode.cut(1, n, n, min(n, self.max_queries))
                    metadata.plans[self.window] = decode.plan(lengths, start, cut)
            out = torch.full((n, *query.shape[1:]), float("nan"), dtype=query.dtype, device=device)
            self._run(layout, q[-n:], k[-n:], v[-n:], pages, metadata, out, stores=path == "dense chunk")
            outputs.append(out[-1:].cpu())
        cache.copy_(pages)
        return outputs


def _workspace(*shapes: tuple[tuple[int, ...], torch.dtype], device: torch.device) -> list[torch.Tensor]:
    """vLLM's workspace, which all layers share; plain memory where there is none (the self-check)."""
    if is_workspace_manager_initialized():
        return list(current_workspace_manager().get_simultaneous(*shapes))
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
