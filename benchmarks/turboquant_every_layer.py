"""Run a module with vLLM's TurboQuant in every layer: python benchmarks/turboquant_every_layer.py MODULE [ARGUMENT…]

vLLM 0.25.1 keeps the first and the last two layers of a dense model in 16 bits and has no flag against it: the layers
are added to --kv-cache-dtype-skip-layers whatever that says.  The engine's configuration is made in this process.
"""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig

    if not TurboQuantConfig.get_boundary_skip_layers.__doc__:  # also fails where there is no such method
        raise SystemExit("this vLLM chooses TurboQuant's 16-bit layers in another way")
    TurboQuantConfig.get_boundary_skip_layers = staticmethod(lambda *_args, **_kwargs: [])
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
