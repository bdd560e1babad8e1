"""What a layer's quantiser knows: matrices and centres per KV head, and the file that keeps them.

Keys ``k`` and queries ``q`` are those after RoPE.  Per KV head::

    k' = (k - key_centre) @ key_matrix            codes hold k'
    q' = q @ query_matrix                         query_matrix = key_matrix^-T, so q'·k' = q·(k - centre)
    v' = (v - value_centre) @ R                   o = o' @ R^T + value_centre

Softmax does not see ``key_centre`` (it shifts all scores of a query alike; not so under a soft cap, see
``LayerParams.uncentred``) and weights that sum to one give
``value_centre`` back exactly, so both are free.  Position 0 of a sequence, the attention sink, has far larger keys and
far smaller values than the rest and nearly the same ones in every sequence: ``sink_key`` and ``sink_value``
(transformed basis) are its own additional centre, added back exactly by the kernels.

``query_factor`` is the upper triangular U with U^T U = E[q'^T q'].  What a rounded key with error e does to scores is
|U e|^2, so keys are rounded in that metric: from the last group of ``GROUP`` elements to the first, a group's error is
carried into the elements still to be rounded (the sequential rounding of GPTQ, arXiv 2210.17323, section 3, and Babai's
nearest plane, here for activations).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch

from fourfold.quant.rotation import rotation

GROUP = 8
"""Elements that are rounded at once.  A rotation spreads what elements have to do with each other over all of them, so
little is lost: errors of real keys of 128 elements, seen through the queries, are 0.0483 (one at a time 0.0474, groups
of 16 0.0495), and the kernels need no chain of 128 steps."""


def middle_clip(head_size: int) -> float:
    """The clip that is best on the mean: a scale, as a fraction of the row's absolute maximum over the zero point.

    A rotated row is nearly normal.  The best range of 16 levels is then 2.5 standard deviations whatever the size, and
    the largest of D elements grows with log D.
    """
    return round(0.88 - 0.04 * math.log2(head_size / 128), 3)


CLIP_APART = 0.04
"""Of each of the two clips of plain rounding from the middle one."""


def clips(head_size: int) -> tuple[float, float]:
    """Candidates of plain rounding: errors of real values of 128 elements are 0.1012 with one, 0.1001 with these two,
    0.0999 with three."""
    middle = middle_clip(head_size)
    return round(middle + CLIP_APART, 3), round(middle - CLIP_APART, 3)


@dataclass(frozen=True, slots=True)
class LayerParams:
    """Quantiser of one layer on this rank; all float32, contiguous.

    Attributes:
        key_centre: [HK, D].
        key_matrix: [HK, D, D]; row vectors are multiplied from the left.
        query_matrix: [HK, D, D], the inverse transpose of ``key_matrix``.
        value_centre: [HK, Dv].
        sink_key: [HK, D], transformed basis.
        sink_value: [HK, Dv], transformed basis.
        query_factor: [HK, D, D] upper triangular with positive diagonal, or empty [0] for plain rounding.
    """

    key_centre: torch.Tensor
    key_matrix: torch.Tensor
    query_matrix: torch.Tensor
    value_centre: torch.Tensor
    sink_key: torch.Tensor
    sink_value: torch.Tensor
    query_factor: torch.Tensor

    @property
    def kv_heads(self) -> int:
        return self.key_centre.shape[0]

    @property
    def head_size(self) -> int:
        return self.key_centre.shape[1]

    @property
    def head_size_v(self) -> int:
        return self.value_centre.shape[1]

    @property
    def value_matrix(self) -> torch.Tensor:
        """[Dv, Dv] rotation of values; the same for every head and layer, so no file holds it."""
        return rotation(self.head_size_v, seed=1).to(torch.float32)

    @property
    def key_clips(self) -> tuple[float, ...]:
        """Candidates for a key's scale: in the metric of the queries the middle one is as good as the best of all."""
        return (middle_clip(self.head_size),) if self.query_factor.numel() else clips(self.head_size)

    @property
    def feedback(self) -> torch.Tensor:
        """[HK, D, D] strictly lower triangular: row i holds what of element i's error element j must absorb; empty for
        plain rounding.

        U = diag(U_0, U_1, …) F with the diagonal blocks U_g of ``GROUP`` of ``query_factor``: F is the identity in its
        own diagonal blocks, zero before them, and behind them the transpose of this.
        """
        if not self.query_factor.numel():
            return self.query_factor
        groups = self.query_factor.to(torch.float64).unflatten(1, (-1, GROUP))
        solved = [
            torch.linalg.solve_triangular(groups[:, g, :, g * GROUP : (g + 1) * GROUP], groups[:, g], upper=True)
            for g in range(groups.shape[1])
        ]
        factor = torch.cat(solved, 1).to(torch.float32)
        group = torch.arange(self.head_size) // GROUP
        return (factor.transpose(1, 2) * (group[:, None] > group[None])).contiguous()

    def to(self, device: torch.device | str) -> LayerParams:
        """The same parameters on another device."""
        return replace(self, **{f.name: getattr(self, f.name).to(device).contiguous() for f in fields(self)})

    def uncentred(self) -> LayerParams:
        """The same quantiser without a key centre, for layers whose logits are soft-capped.

        A cap acts on whole scores, so a constant taken from all of them no longer cancels in the softmax.
        """
        shift = torch.einsum("hd,hde->he", self.key_centre, self.key_matrix)
        return replace(self, key_centre=torch.zeros_like(self.key_centre), sink_key=self.sink_key + shift)

    def check(self, kv_heads: int, head_size: int, head_size_v: int) -> str | None:
        """Why these parameters cannot serve a layer of that shape, or None."""
        want = {
            "key_centre": (kv_heads, head_size),
            "key_matrix": (kv_heads, head_size, head_size),
            "query_matrix": (kv_heads, head_size, head_size),
            "value_centre": (kv_heads, head_size_v),
            "sink_key": (kv_heads, head_size),
            "sink_value": (kv_heads, head_size_v),
        }
        for name, shape in want.items():
            if tuple(getattr(self, name).shape) != shape:
                return f"{name} has shape {tuple(getattr(self, name).shape)} where {shape} is needed"
        if self.query_factor.numel():
            if tuple(self.query_factor.shape) != want["key_matrix"]:
                return f"query_factor has shape {tuple(self.query_factor.shape)} where {want['key_matrix']} is needed"
            if not (self.query_factor.diagonal(dim1=1, dim2=2) > 0).all():
                return "query_factor has a diagonal that is not positive"
        for f in fields(self):
            if not torch.isfinite(getattr(self, f.name)).all():
                return f"{f.name} holds values that are not finite"
        return None


def identity_params(kv_heads: int, head_size: int, head_size_v: int) -> LayerParams:
    """Rotation only: what can be done knowing neither data nor weights."""
    matrix = rotation(head_size).to(torch.float32).repeat(kv_heads, 1, 1)
    return LayerParams(
        key_centre=torch.zeros(kv_heads, head_size),
        key_matrix=matrix.contiguous(),
        query_matrix=matrix.clone(),  # orthogonal: its own inverse transpose
        value_centre=torch.zeros(kv_heads, head_size_v),
        sink_key=torch.zeros(kv_heads, head_size),
        sink_value=torch.zeros(kv_heads, head_size_v),
        query_factor=torch.zeros(0),
    )
