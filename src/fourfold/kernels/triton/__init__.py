"""Portable kernels in Triton: one to quantise and store, one for attention over 4-bit pages.

They run wherever Triton does, and in its interpreter on a CPU (``TRITON_INTERPRET=1``); ``fourfold.kernels.cuda`` is
the fast path.  Only this package imports triton.
"""
