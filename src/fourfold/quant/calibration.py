"""Statistics of keys, queries and values, and the quantiser parameters that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fourfold.quant.params import LayerParams, identity_params
from fourfold.quant.rotation import rotation

DAMPING = 0.02
"""Share of the mean query energy added to every channel before the feedback is factorised: a short text must not
make a channel look free."""


@dataclass(slots=True)
class Statistics:
    """Running sums over one layer's post-RoPE keys and queries and its values; float64.

    Position 0 is counted apart: it is the attention sink.
    """

    tokens: int
    sequences: int
    key: torch.Tensor  # [HK, D]
    key_key: torch.Tensor  # [HK, D, D]
    query_query: torch.Tensor  # [HK, D, D], mean over the group's heads
    value: torch.Tensor  # [HK, Dv]
    first_key: torch.Tensor  # [HK, D]
    first_value: torch.Tensor  # [HK, Dv]

    @classmethod
    def empty(cls, kv_heads: int, head_size: int, head_size_v: int, device: torch.device | str = "cpu") -> Statistics:
        """Sums of nothing, kept on ``device``."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        d, dv = head_size, head_size_v
        return cls(
            tokens=0,
            sequences=0,
            key=zeros(kv_heads, d),
            key_key=zeros(kv_heads, d, d),
            query_query=zeros(kv_heads, d, d),
            value=zeros(kv_heads, dv),
            first_key=zeros(kv_heads, d),
            first_value=zeros(kv_heads, dv),
        )

    def add(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Count one sequence from its position 0: query [T, H, D], key [T, HK, D], value [T, HK, Dv]."""
        kv_heads = key.shape[1]
        k = key[1:].to(torch.float32)
        q = query[1:].to(torch.float32).unflatten(1, (kv_heads, -1))
        self.tokens += k.shape[0]
        self.sequences += 1
        self.key += k.sum(0)
        self.key_key += torch.einsum("thd,the->hde", k, k)
        self.query_query += torch.einsum("thgd,thge->hde", q, q) / q.shape[2]
        self.value += value[1:].to(torch.float64).sum(0)
        self.first_key += key[0]
        self.first_value += value[0]

    def params(self, *, feedback: bool = True) -> LayerParams:
        """Centre, balance, rotate, sink centre and error feedback (see ``LayerParams``).

        Balance: key channel c is scaled by w_c = E[q_c^2]^a / Var[k_c]^(1/2 - a) and the query by 1/w_c.  Without
        feedback the error of a score is smallest at a = 1/4, when all channels are rounded with one scale.  Sequential
        rounding makes errors in proportion to the determinant of the metric, whatever the balance, so there only the
        keys' spread counts: a = 0, if rounding were sequential throughout and unbounded.  In groups a = 1/8 is best:
        errors of scores of another text are 5% (Qwen2.5-1.5B) and 3% (SmolLM2) below those of a = 1/4.
        """
        if self.tokens < 2 or self.sequences < 1:
            raise ValueError("statistics of at least two tokens are needed")
        if self.key.device.type != "cpu":
            sums = ("key", "key_key", "query_query", "value", "first_key", "first_value")
            return replace(self, **{name: getattr(self, name).cpu() for name in sums}).params(feedback=feedback)
        n = self.tokens
        head_size = self.key.shape[1]
        centre = self.key / n
        key_variance = (self.key_key / n).diagonal(dim1=1, dim2=2) - centre.square()
        query_energy = (self.query_query / n).diagonal(dim1=1, dim2=2)
        floor = 1e-6
        key_variance = key_variance.clamp_min(floor * key_variance.mean(1, keepdim=True)).clamp_min(1e-12)
        query_energy = query_energy.clamp_min(floor * query_energy.mean(1, keepdim=True)).clamp_min(1e-12)
        share = 1 / 8 if feedback else 1 / 4
        balance = query_energy**share / key_variance ** (1 / 2 - share)
        turn = rotation(head_size)
        key_matrix = balance[:, :, None] * turn
        query_matrix = turn / balance[:, :, None]
        value_centre = self.value / n
        value_turn = rotation(self.value.shape[1], seed=1)
        return LayerParams(
            key_centre=_single(centre),
            key_matrix=_single(key_matrix),
            query_matrix=_single(query_matrix),
            value_centre=_single(value_centre),
            sink_key=_single(torch.einsum("hd,hde->he", self.first_key / self.sequences - centre, key_matrix)),
            sink_value=_single((self.first_value / self.sequences - value_centre) @ value_turn),
            query_factor=_single(_factor(self.query_query / n, query_matrix)) if feedback else torch.zeros(0),
        )


def _single(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).contiguous()


def _factor(query_query: torch.Tensor, query_matrix: torch.Tensor) -> torch.Tensor:
    """[HK, D, D] upper triangular factor of the damped second moment of the transformed queries, mean energy 1."""
    moment = query_matrix.transpose(1, 2) @ query_query @ query_matrix
    size = moment.shape[-1]
    moment = moment / moment.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)[:, None, None]
    return torch.linalg.cholesky(moment + DAMPING * torch.eye(size, dtype=moment.dtype), upper=True)


def bias_params(key_bias: torch.Tensor | None, kv_heads: int, head_size: int, head_size_v: int) -> LayerParams:
    """Data-free parameters: rotation, and the key projection's bias as centre.

    Args:
        key_bias: [P, HK, D] the bias after RoPE at P positions, or None where the projection has no bias.  Without it
            some models (Qwen2) lose all sense: their key bias is far larger than what the keys say.
    """
    params = identity_params(kv_heads, head_size, head_size_v)
    if key_bias is None:
        return params
    return replace(params, key_centre=_single(key_bias.to(torch.float64).mean(0).cpu()))
