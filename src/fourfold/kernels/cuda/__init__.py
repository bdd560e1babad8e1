"""CUDA C++ kernels, compiled at run time by NVRTC through ``cuda.bindings``: the fast path on NVIDIA GPUs.

No compiler and no header is needed on the user's machine; the cubins are cached in ``Settings.cache_dir``.
Only this package imports ``cuda.*``, and only when a kernel is first asked for.
"""
