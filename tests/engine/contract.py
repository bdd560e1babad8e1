"""What the plugin and one vLLM must agree on, without an engine: run by test_contract.py, a process for each vLLM.

Where the seam is on GPUs and there is none, vLLM is told that there is (``no_gpu``) and no kernel runs.
"""

# ruff: noqa: E402 - vLLM hears of its platform before it is imported

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fourfold.modes import GPU_SEAMS, MODES, SEAMS, UNPROVEN, installed_vllm

from .no_gpu import pretend

FOUND = installed_vllm()
assert FOUND is not None
SEAM = SEAMS[FOUND[1]]
GPU = SEAM in GPU_SEAMS
if GPU and not torch.cuda.is_available():
    pretend()

from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor import model_loader
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.core.sched.scheduler import Scheduler

from fourfold.config import Settings
from fourfold.errors import FourfoldError
from fourfold.layout import HEAD_SIZES, PageLayout
from fourfold.quant.params import identity_params
from fourfold.vllm_plugin import compat
from fourfold.vllm_plugin.attention import FourfoldBackend, FourfoldImpl, check_page
from fourfold.vllm_plugin.identity import describe
from fourfold.vllm_plugin.loader import calibrating

from .conftest import llama_config

BLOCKS = (16, 48, 128)
OUR_OWN = {
    *("set_params", "required_params", "check_cache", "last_token", "calibrate", "kernel", "decode", "sink", "cuts"),
    *("reserve", "captured"),
}
"""Public names of our classes that vLLM never asks for."""
BY_BACKEND = {"customize_spec", "supported_kv_cache_layouts", "supports_sliding_window"}
NOT_ASKED = {
    "A": {*BY_BACKEND, "supports_device_cpu_query_lens_mismatch"},
    "B": set(),
    "C": {"get_kv_cache_shape"},
}
"""Those that only other seams' vLLM asks for."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(not GPU, reason=f"seam {SEAM} is not on GPUs")
by_backend = pytest.mark.skipif(SEAM == "A", reason="in seam A layers ask for pages, and windows have no spec")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Llama's engine configuration as ``fourfold serve`` would ask for it, the plugin installed."""
    folder = tmp_path_factory.mktemp("model")
    model = llama_config(64, 2, torch_dtype="bfloat16", max_position_embeddings=4096)
    (folder / "config.json").write_text(json.dumps(model))
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, max_num_batched_tokens=2048, max_num_seqs=64,
        **MODES["fourfold"].engine,
    )  # fmt: skip
    compat.install()
    return arguments.create_engine_config()


@pytest.fixture
def layer(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes attention layers as a model does."""
    compilation = config.compilation_config
    monkeypatch.setattr(compilation, "static_forward_context", {})

    def make(heads: int = 8, kv_heads: int = 2, size: int = 64, window: int | None = None) -> Attention:
        name = f"model.layers.{len(compilation.static_forward_context)}.self_attn.attn"
        with set_current_vllm_config(config):
            made = Attention(
                heads, size, size**-0.5, kv_heads, cache_config=config.cache_config, prefix=name,
                per_layer_sliding_window=window,
            )  # fmt: skip
        compat.ask_for_page(made)
        return made

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield make
    torch.set_default_dtype(before)


def spec_of(layer: Attention, config: Any) -> Any:
    """As the model runners ask for it."""
    spec = layer.get_kv_cache_spec(config)
    if SEAM == "A":
        return spec
    from vllm.v1.worker.utils import customize_attention_spec

    return customize_attention_spec(layer.get_attn_backend(), spec)


def allot(config: Any, layers: dict[str, Attention], blocks: int) -> dict[str, torch.Tensor]:
    """Caches as vLLM would lay them out, on the CPU."""
    specs = {name: spec_of(one, config) for name, one in layers.items()}
    if SEAM == "A":
        shapes = {
            name: one.get_attn_backend().get_kv_cache_shape(
                blocks, specs[name].block_size, one.num_kv_heads, one.head_size
            )
            for name, one in layers.items()
        }
        sizes = {name: blocks * spec.page_size_bytes for name, spec in specs.items()}
        return {name: torch.zeros(sizes[name], dtype=torch.uint8).view(shape) for name, shape in shapes.items()}
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.worker.utils import allocate_kv_cache

    names = [one.name for one in get_supported_kv_cache_layouts({x.get_attn_backend() for x in layers.values()})]
    layout = resolve_kv_cache_layout(config, [names], specs.values())
    made = cache_config(config, specs, blocks)
    return dict(
        allocate_kv_cache(
            made, torch.device("cpu"), layout, [group.kv_cache_spec.block_size for group in made.kv_cache_groups]
        )
    )


def cache_config(config: Any, specs: dict[str, Any], blocks: int) -> Any:
    """vLLM's plan of the pool for ``blocks`` blocks."""
    try:
        from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups_from_builder
    except ImportError:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

        config.cache_config.num_gpu_blocks_override = blocks
        groups = get_kv_cache_groups(config, specs)
        return get_kv_cache_config_from_groups(config, groups, available_memory=1 << 30)
    builder = get_kv_cache_config_builder(config)
    groups = get_kv_cache_groups_from_builder(builder, config, specs)
    return builder.get_kv_cache_config_from_groups(config, groups, num_blocks=blocks)


def test_the_seam_is_the_versions(config: Any) -> None:
    here = compat.seam()
    assert (here.name, here.vllm, here.device) == (SEAM, FOUND[1], "cuda" if GPU else "cpu")
    assert MODES["fourfold"].engine == ({"attention_backend": "CUSTOM"} if GPU else {})


@pytest.mark.parametrize("window", [None, 32])
def test_vllm_chooses_our_backend(layer: Any, window: int | None) -> None:
    made = layer(window=window)
    assert issubclass(made.get_attn_backend(), FourfoldBackend)
    assert isinstance(made.impl, FourfoldImpl)
    assert made.impl.sliding_window == window


def test_everything_we_define_is_something_vllm_asks_for(layer: Any) -> None:
    """A hook that vLLM renamed would otherwise be lost without a word."""
    backend = layer().get_attn_backend()
    pairs = (
        (backend, AttentionBackend),
        (backend.get_impl_cls(), AttentionImpl),
        (backend.get_builder_cls(), AttentionMetadataBuilder),
    )
    lost = {
        name
        for ours, theirs in pairs
        for one in ours.__mro__
        if one.__module__.startswith("fourfold.")
        for name in vars(one)
        if not name.startswith("_") and not hasattr(theirs, name)
    }
    assert lost - OUR_OWN == NOT_ASKED[SEAM]
    compat.check_scheduler(Scheduler)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kv_heads", [1, 2, 5])
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_pages_are_the_layouts(config: Any, layer: Any, size: int, kv_heads: int, block: int) -> None:
    config.cache_config.block_size = block
    layout = PageLayout(block, kv_heads, size, size)
    made = layer(2 * kv_heads, kv_heads, size)
    assert check_page(spec_of(made, config)) == layout
    (cache,) = allot(config, {made.layer_name: made}, blocks=3).values()
    assert cache.untyped_storage().nbytes() == 3 * layout.page_bytes
    assert made.impl.check_cache(made, cache) == layout


@by_backend
@pytest.mark.parametrize("block", BLOCKS)
def test_layers_with_and_without_a_window_share_the_pool(config: Any, layer: Any, block: int) -> None:
    config.cache_config.block_size = block
    layers = {one.layer_name: one for one in (layer(), layer(window=64), layer(), layer(window=64))}
    specs = [check_page(spec_of(one, config)) for one in layers.values()]
    assert set(specs) == {PageLayout(block, 2, 64, 64)}
    for name, cache in allot(config, layers, blocks=4).items():
        assert layers[name].impl.check_cache(layers[name], cache) == specs[0]


def test_larger_blocks_are_split_into_pages(layer: Any) -> None:
    from vllm.v1.worker.utils import select_common_block_size

    backend = layer().get_attn_backend()
    for block, page in ((16, 16), (80, 80), (128, 128), (256, 128), (144, 48), (1024, 128)):
        assert select_common_block_size(block, [backend]) == page


@by_backend
def test_padded_pages_are_refused(config: Any, layer: Any) -> None:
    config.cache_config.block_size = 16
    spec = spec_of(layer(), config)
    with pytest.raises(FourfoldError, match=r"pads them.*drafter"):
        check_page(replace(spec, page_size_padded=spec.page_size_bytes + 64))


def test_a_dense_page_is_refused(config: Any, layer: Any) -> None:
    """What vLLM would allot if it never asked us."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    with pytest.raises(FourfoldError, match="did not take effect"):
        check_page(FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16))


def test_every_load_format_calibrates(config: Any) -> None:
    for name, loader in model_loader._LOAD_FORMAT_TO_MODEL_LOADER.items():
        assert calibrating(loader) is loader, name
        taken = list(inspect.signature(loader.__mro__[2].load_model).parameters)  # vLLM's own
        assert taken[1:4] == ["vllm_config", "model_config", "prefix"], name


def test_the_operator_reads_how_far_this_was_tested(config: Any, layer: Any) -> None:
    line = describe({"layer": layer()}, "none", 0.0, Settings(), config)
    assert f"seam {SEAM} (" in line
    assert ("never run on a GPU" in line) == (SEAM in UNPROVEN)


@on_gpu
def test_adaptive_verification_is_refused(layer: Any) -> None:
    """There the GPU decides how many drafts of a request are verified, and the CPU's lengths are wrong."""
    backend = layer().get_attn_backend()
    if "use_adaptive_verification" not in inspect.signature(backend.validate_configuration).parameters:
        pytest.skip("this vLLM has no adaptive verification")
    assert not backend.supports_device_cpu_query_lens_mismatch()


@on_gpu
def test_keys_and_values_of_two_sizes_are_refused(layer: Any) -> None:
    with pytest.raises(FourfoldError, match="keys of 64 and values of 128"):
        layer().impl.set_params(identity_params(2, 64, 128))


class Planned:
    """A builder whose plans stay on the host: what each step gave the decode kernels and the dense ones."""

    def __init__(self, config: Any, layer: Any, monkeypatch: pytest.MonkeyPatch, windows: tuple[int | None, ...]):
        from fourfold.kernels.cuda import decode
        from fourfold.vllm_plugin import attention_cuda, metadata_cuda

        if not torch.cuda.is_available():
            monkeypatch.setattr(metadata_cuda, "write_positions", lambda lengths, start, positions: None)
            monkeypatch.setattr(decode.Decode, "kernels", lambda *_: None)
            monkeypatch.setattr(
                decode.Decode, "plan", lambda self, lengths, start, cut, numbers: decode.Plan(cut, *[numbers] * 5)
            )
        monkeypatch.setattr(attention_cuda, "is_workspace_manager_initialized", lambda: False)
        config.cache_config.block_size = 16
        layers = [layer(window=window) for window in windows]
        for one in layers:
            one.impl.device = DEVICE
        spec = spec_of(layers[0], config)
        self.compilation = config.compilation_config
        self.builder = (
            layers[0].get_attn_backend().get_builder_cls()(spec, [one.layer_name for one in layers], config, DEVICE)
        )
        self.support = self.builder.get_cudagraph_support(config, spec)

    def step(self, queries: list[int], lengths: list[int], **more: Any) -> Any:
        start = torch.tensor([0, *queries]).cumsum(0).int()
        seq_lens, tokens = torch.tensor(lengths, dtype=torch.int32), int(start[-1])
        common = CommonAttentionMetadata(
            query_start_loc=start.to(DEVICE), query_start_loc_cpu=start, seq_lens=seq_lens.to(DEVICE),
            num_reqs=len(queries), num_actual_tokens=tokens, max_query_len=max(queries), max_seq_len=max(lengths),
            block_table_tensor=torch.zeros(len(queries), 256, dtype=torch.int32, device=DEVICE),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=DEVICE), seq_lens_cpu_upper_bound=seq_lens,
            **more,
        )  # fmt: skip
        return self.builder.build(0, common)


@on_gpu
@pytest.mark.parametrize("windows", [(None,), (32,)])
def test_steps_are_planned_from_vllms_metadata(
    config: Any, layer: Any, monkeypatch: pytest.MonkeyPatch, windows: tuple[int | None, ...]
) -> None:
    planned = Planned(config, layer, monkeypatch, windows)
    window = windows[0] or 0
    monkeypatch.setattr(planned.compilation, "cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE)
    decodes = planned.step([1, 1, 1], [100, 7, 300])
    assert (decodes.rows, decodes.pieces, decodes.plans[window].cut.queries) == (3, {}, 1)
    chunks = planned.step([1, 1, 2000, 20], [100, 7, 2900, 20])
    assert (chunks.rows, chunks.max_query) == (2, 2000)
    (piece,) = chunks.pieces[window]
    assert (piece.rows, piece.sequences) == (slice(2, 2022), slice(2, 4))
    short = planned.step([1, 40], [100, 140])
    assert (short.rows, short.pieces) == (41, {})
    with pytest.raises(FourfoldError, match="not causal"):
        planned.step([1], [9], causal=False)


@on_gpu
def test_graphs_of_mixed_batches_hold_any_batch(config: Any, layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned(config, layer, monkeypatch, (None,))
    assert planned.support.name == "ALWAYS"
    monkeypatch.setattr(planned.compilation, "cudagraph_mode", CUDAGraphMode.FULL)
    captured = planned.compilation.max_cudagraph_capture_size
    batches = ([1, 1, captured - 2], [captured - 20, 0, 20], [captured // 2, captured // 4, captured // 4])
    steps = [planned.step(queries, [900] * 3) for queries in batches]
    assert steps[0].rows == captured
    assert not any(step.pieces for step in steps)
    assert len({step.plans[0].cut for step in steps}) == 1
    larger = planned.step([1, 1, 2000], [2900] * 3)
    assert larger.rows == 2
    assert larger.pieces
    monkeypatch.setenv("FOURFOLD_PREFILL", "raw")
    assert type(planned.builder).get_cudagraph_support(config, None).name == "UNIFORM_BATCH"


def test_loader_module_reads_what_layers_have(layer: Any) -> None:
    from fourfold.vllm_plugin.loader import attention_layers

    made = layer()
    model = torch.nn.ModuleDict({"attn": made})
    assert attention_layers(model) == {made.layer_name: made}
    made.impl = SimpleNamespace()
    with pytest.raises(FourfoldError, match="not served from 4-bit pages"):
        attention_layers(model)
