"""PageLayout: the only source of bytes, offsets and strides of a 4-bit KV page.

A page is one vLLM block of one layer.  It holds, for each KV head and contiguously::

    K codes   [block_size, head_size // 2]     uint8, two codes a byte
    V codes   [block_size, head_size_v // 2]   uint8
    K scales  [block_size]                     float16
    V scales  [block_size]                     float16

Byte ``j`` of a code row holds the code of element ``j`` in its low and of element ``j + D/2`` in its high
nibble.  A code ``c`` stands for ``(c - 7.5) * scale``.  Elements are those of the *transformed* key and
value (see ``fourfold.quant.transform``).  Nothing is padded: ``(D + Dv) / 2 + 4`` bytes per token and KV
head, which is 132 at D = 128 against 512 in bf16 (3.88 times less) and 68 at D = 64 (3.76 times less).

No torch here: the layout is also what capacity tables, the host pool and the Rust coordinator read.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.errors import FourfoldError

HEAD_SIZES = (64, 80, 96, 128, 192, 256)
"""Head sizes that every kernel handles and the tests cover."""
MIN_BLOCK, MAX_BLOCK = 16, 128
SCALE_BYTES = 2
"""One float16 scale per token and head, for K and for V."""
ZERO_POINT = 7.5
"""Code ``c`` stands for ``(c - ZERO_POINT) * scale``; 16 levels, symmetric, no level at zero."""
LEVELS = 16


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Byte layout of one page of one layer.

    Attributes:
        block_size: tokens a page holds (16 to 128, a multiple of 16).
        num_kv_heads: KV heads on this rank.
        head_size: elements of a key (one of ``HEAD_SIZES``).
        head_size_v: elements of a value (one of ``HEAD_SIZES``).

    Raises:
        FourfoldError: for a size the kernels do not handle.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int

    def __post_init__(self) -> None:
        for name, size in (("head size", self.head_size), ("value head size", self.head_size_v)):
            if size not in HEAD_SIZES:
                raise FourfoldError(
                    f"4-bit pages cannot hold a {name} of {size}",
                    why=f"the kernels handle {', '.join(map(str, HEAD_SIZES))}",
                    fix="serve this model without Fourfold (FOURFOLD=0)",
                )
        if not MIN_BLOCK <= self.block_size <= MAX_BLOCK or self.block_size % 16:
            raise FourfoldError(
                f"4-bit pages cannot hold blocks of {self.block_size} tokens",
                why=f"the kernels handle multiples of 16 from {MIN_BLOCK} to {MAX_BLOCK}",
                fix="pass --block-size 64, or leave it out",
            )
        if self.num_kv_heads < 1:
            raise FourfoldError(
                f"a page needs at least one KV head, not {self.num_kv_heads}",
                fix="check num_key_value_heads in the model's config.json",
            )

    @property
    def k_row(self) -> int:
        """Bytes of one token's key codes."""
        return self.head_size // 2

    @property
    def v_row(self) -> int:
        """Bytes of one token's value codes."""
        return self.head_size_v // 2

    @property
    def bytes_per_token_head(self) -> int:
        """Bytes per token and KV head: codes of K and V and two float16 scales."""
        return self.k_row + self.v_row + 2 * SCALE_BYTES

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token in one layer, all KV heads of this rank."""
        return self.bytes_per_token_head * self.num_kv_heads

    @property
    def head_page_bytes(self) -> int:
        """Bytes of one head's part of a page; also the stride from head to head."""
        return self.bytes_per_token_head * self.block_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a whole page; also the stride from page to page."""
        return self.head_page_bytes * self.num_kv_heads

    @property
    def v_codes_offset(self) -> int:
        """Offset of the value codes inside a head's part of the page (key codes start at 0)."""
        return self.k_row * self.block_size

    @property
    def k_scales_offset(self) -> int:
        """Offset of the key scales inside a head's part of the page."""
        return (self.k_row + self.v_row) * self.block_size

    @property
    def v_scales_offset(self) -> int:
        """Offset of the value scales inside a head's part of the page."""
        return self.k_scales_offset + SCALE_BYTES * self.block_size

    def ratio(self, bytes_per_element: int = 2) -> float:
        """Tokens held per byte, relative to an unquantised cache of ``bytes_per_element`` (bf16: 2)."""
        return (self.head_size + self.head_size_v) * bytes_per_element / self.bytes_per_token_head
