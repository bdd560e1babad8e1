"""A layer's quantiser as the Triton kernels read it: everything computed once and resident, so that graphs can be
captured around the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fourfold.quant.params import LayerParams


@dataclass(frozen=True, slots=True)
class TritonParams:
    """``LayerParams`` on a device, with its derived matrices.

    Attributes:
        layer: the parameters, float32.
        value_matrix: [Dv, Dv]; value_inverse: its transpose.
        feedback: [HK, D, D] ``LayerParams.feedback``, or empty for plain rounding.
    """

    layer: LayerParams
    value_matrix: torch.Tensor
    value_inverse: torch.Tensor
    feedback: torch.Tensor

    @classmethod
    def of(cls, params: LayerParams, device: torch.device | str) -> TritonParams:
        """Move and derive."""
        matrix = params.value_matrix.to(device)
        return cls(params.to(device), matrix.contiguous(), matrix.T.contiguous(), params.feedback.to(device))
