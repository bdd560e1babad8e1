"""Orthogonal rotations of any head size: random signs, then a Hadamard matrix or a power of two of one times a DCT.

Rotating spreads a few large channels over all of them, so that one scale serves a whole row (QuIP, QuaRot; TurboQuant,
arXiv 2504.19874, section 3).
"""

from __future__ import annotations

import math

import torch


def hadamard(n: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix, orthonormal, [n, n] float64; n a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    if matrix.shape[0] != n:
        raise ValueError(f"{n} is not a power of two")
    return matrix / math.sqrt(n)


def dct(n: int) -> torch.Tensor:
    """Orthonormal DCT-II matrix, [n, n] float64: dense for any n, and its largest entry is only √2 above 1/√n."""
    k = torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(math.pi / n * k[:, None] * (k[None, :] + 0.5)) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix


def rotation(n: int, seed: int = 0) -> torch.Tensor:
    """An orthogonal [n, n] float64 matrix: signs, then Hadamard(2^k) ⊗ DCT(n / 2^k) with the largest such k.

    80 = 16 × 5, 96 = 32 × 3 and 192 = 64 × 3 work like the powers of two.
    """
    power = n & -n
    mixed = torch.kron(hadamard(power), dct(n // power)) if n != power else hadamard(n)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (n,), generator=generator).to(torch.float64) * 2 - 1
    return signs[:, None] * mixed
