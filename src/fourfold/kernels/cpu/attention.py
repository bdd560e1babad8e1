"""Launcher of the CPU kernels: one object per layer shape, one C call per forward."""

from __future__ import annotations

import ctypes

import torch

from fourfold.errors import FourfoldError
from fourfold.kernels.cpu.binding import DTYPES, Call, library
from fourfold.layout import PageLayout
from fourfold.quant.params import LayerParams, clips

MAX_GROUP = 64
"""Query heads per KV head: ROWS of plan.h, the rows of one work item."""


class Scratch:
    """float32 working memory, grown when needed and shared by all layers of a process (they run one after another)."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def at_least(self, count: int) -> torch.Tensor:
        if self._memory.numel() < count:
            self._memory = torch.empty(count + count // 4, dtype=torch.float32)
        return self._memory


_scratch = Scratch()


class CpuLayer:
    """Quantise, store and attend for one layer.

    Args:
        layout: page layout; its head count and sizes are those of this rank.
        num_heads: query heads, a multiple of ``layout.num_kv_heads``.
        scale: softmax scale, folded into the query matrix.
        params: quantiser of the layer.
        soft_cap: scores become ``cap * tanh(score / cap)``; 0 for none.
        window: sliding window in tokens, the query's own included; 0 for none.
        raw: the new tokens of a call attend to each other unquantised.
    """

    def __init__(
        self,
        layout: PageLayout,
        num_heads: int,
        scale: float,
        params: LayerParams,
        *,
        soft_cap: float = 0.0,
        window: int = 0,
        raw: bool = False,
    ) -> None:
        problem = params.check(layout.num_kv_heads, layout.head_size, layout.head_size_v)
        if problem:
            raise FourfoldError("calibration does not fit the layer", why=problem, fix="calibrate this model again")
        if num_heads % layout.num_kv_heads:
            raise FourfoldError(f"{num_heads} query heads cannot share {layout.num_kv_heads} KV heads evenly")
        if num_heads > MAX_GROUP * layout.num_kv_heads:
            raise FourfoldError(
                f"{num_heads // layout.num_kv_heads} query heads share a KV head",
                why=f"the CPU kernels hold at most {MAX_GROUP} query rows of a group at once",
                fix="serve this model without Fourfold (FOURFOLD=0)",
            )
        self.layout, self.num_heads, self._lib = layout, num_heads, library()
        params = params.to("cpu")
        # the struct holds bare pointers, so the tensors must live as long as this object
        self._tensors = {
            "key_centre": params.key_centre,
            "key_matrix": params.key_matrix,
            "query_matrix": (params.query_matrix * scale).contiguous(),
            "value_centre": params.value_centre,
            "value_matrix": params.value_matrix.contiguous(),
            "value_inverse": params.value_matrix.T.contiguous(),
            "sink_key": params.sink_key,
            "sink_value": params.sink_value,
            "feedback": params.feedback,
            "key_clips": torch.tensor(params.key_clips),
            "value_clips": torch.tensor(clips(params.head_size_v)),
        }
        self._call = Call(
            heads=num_heads,
            kv_heads=layout.num_kv_heads,
            head_size=layout.head_size,
            head_size_v=layout.head_size_v,
            block_size=layout.block_size,
            page_stride=layout.page_bytes,
            head_stride=layout.head_page_bytes,
            v_codes=layout.v_codes_offset,
            k_scales=layout.k_scales_offset,
            v_scales=layout.v_scales_offset,
            key_clip_count=len(params.key_clips),
            value_clip_count=len(clips(params.head_size_v)),
            soft_cap=soft_cap,
            window=window,
            raw=int(raw),
            **{name: tensor.data_ptr() or None for name, tensor in self._tensors.items()},
        )

    def _prepare(
        self,
        cache: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        slots: torch.Tensor | None,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        tokens: int,
    ) -> Call:
        call = self._call
        call.tokens, call.sequences = tokens, seq_lens.shape[0]
        call.cache = cache.data_ptr()
        call.query_start, call.seq_lens = query_start.data_ptr(), seq_lens.data_ptr()
        call.slots = slots.data_ptr() if slots is not None else None
        call.key = call.value = None
        if key is not None and value is not None:
            _dense(key, "key")
            _dense(value, "value")
            call.dtype = DTYPES[key.dtype]
            call.key, call.key_stride = key.data_ptr(), key.stride(0)
            call.value, call.value_stride = value.data_ptr(), value.stride(0)
        call.threads = torch.get_num_threads()
        return call

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> None:
        """Quantise new tokens [T, HK, D], [T, HK, Dv] into their slots ([T] int64) without attending."""
        call = self._prepare(cache, query_start, seq_lens, slots, key, value, key.shape[0])
        self._lib.ff_store(ctypes.byref(call))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: torch.Tensor,
        output: torch.Tensor,
        *,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slots: torch.Tensor | None,
        causal: bool = True,
    ) -> None:
        """Store the new tokens, then attend to the pages; one call serves decodes, drafts and prefill chunks alike.

        Args:
            query: [T, H, D] float32, bfloat16 or float16; key: [T, HK, D]; value: [T, HK, Dv]; None where another layer
                has stored the tokens already.
            cache: uint8, contiguous, [pages, HK, block, bytes] or any shape with the same bytes.
            output: [T, H, Dv], written.
            query_start: [S + 1] int32; seq_lens: [S] int32, new tokens included; block_table: [S, N] int32;
            slots: [T] int64, negative slots are not stored; None stores nothing.
        """
        _dense(query, "query")
        _dense(output, "output")
        call = self._prepare(cache, query_start, seq_lens, slots, key, value, query.shape[0])
        call.dtype = DTYPES[query.dtype]
        call.query, call.query_stride = query.data_ptr(), query.stride(0)
        call.output, call.output_stride = output.data_ptr(), output.stride(0)
        call.block_table, call.block_table_stride = block_table.data_ptr(), block_table.stride(0)
        call.causal = int(causal)
        pointer = ctypes.byref(call)
        scratch = _scratch.at_least(self._lib.ff_scratch_floats(pointer))
        call.scratch, call.scratch_floats = scratch.data_ptr(), scratch.numel()
        if self._lib.ff_attention(pointer):
            raise FourfoldError("the attention kernel was given too little scratch memory", fix="report this as a bug")


def _dense(tensor: torch.Tensor, name: str) -> None:
    if tensor.stride(-1) != 1 or tensor.stride(-2) != tensor.shape[-1]:
        raise ValueError(f"{name} must be dense within a token, not strided {tensor.stride()}")
