"""Rotation, codec and calibration: what they promise, on small random data with the structure of real keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fourfold.errors import FourfoldError
from fourfold.layout import HEAD_SIZES, PageLayout
from fourfold.quant import codec, files
from fourfold.quant.calibration import Statistics, bias_params
from fourfold.quant.params import LayerParams, identity_params
from fourfold.quant.rotation import rotation
from fourfold.quant.text import calibration_windows, read_text


@pytest.mark.parametrize("size", HEAD_SIZES)
def test_rotations_are_orthogonal_and_spread(size: int) -> None:
    turn = rotation(size)
    assert torch.allclose(turn @ turn.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert turn.abs().max() <= 1.5 / size**0.5  # a single large channel reaches every element


def keys(tokens: int, heads: int, size: int, seed: int = 0) -> torch.Tensor:
    """Keys as models have them: a large constant, a few large channels, correlated."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size, generator=torch.Generator().manual_seed(99)) * torch.logspace(0.5, -1.5, size)
    bias = 20 * torch.randn(heads, size, generator=torch.Generator().manual_seed(98))
    return torch.randn(tokens, heads, size, generator=g) @ mix.T / size**0.5 + bias


def calibrated(heads: int, size: int, **options: bool) -> LayerParams:
    s = Statistics.empty(heads, size, size)
    for i in range(4):
        k = keys(200, heads, size, seed=i)
        k[0] += 30  # the sink
        q = torch.randn(200, 3 * heads, size, generator=torch.Generator().manual_seed(i)) * torch.logspace(-1, 1, size)
        s.add(q, k, torch.randn(200, heads, size, generator=torch.Generator().manual_seed(50 + i)))
    return s.params(**options)


def test_scores_survive_the_transform() -> None:
    p = calibrated(2, 64)
    k, q = keys(50, 2, 64, seed=7), torch.randn(50, 2, 64)
    exact = torch.einsum("qhd,khd->hqk", q, k - p.key_centre)
    turned = torch.einsum("qhd,khd->hqk", torch.einsum("thd,hde->the", q, p.query_matrix), codec.transform_key(k, p))
    assert torch.allclose(exact, turned, rtol=1e-3, atol=1e-3)


def test_uncentred_scores_are_the_whole_scores() -> None:
    """What a soft cap acts on: without the centre's part, tanh(score / cap) would be another number."""
    p = calibrated(2, 64).uncentred()
    assert not p.key_centre.any()
    k, q = keys(50, 2, 64, seed=7), torch.randn(50, 2, 64)
    k[0] += 30
    query = torch.einsum("thd,hde->the", q, p.query_matrix)
    exact = torch.einsum("qhd,khd->hqk", q, k)
    assert torch.allclose(torch.einsum("qhd,khd->hqk", query, codec.transform_key(k, p)), exact, rtol=1e-3, atol=1e-2)
    centred = torch.einsum("qhd,khd->hqk", q, k - calibrated(2, 64).key_centre)
    assert (centred - exact).norm() / exact.norm() > 0.5
    # the sink's own centre moves with it: the mean first key is still stored as zeros
    q = calibrated(2, 64)
    first = q.key_centre + torch.einsum("he,hde->hd", q.sink_key, torch.linalg.inv(q.key_matrix).mT)
    assert torch.allclose(codec.transform_key(first[None], p)[0], p.sink_key, rtol=1e-3, atol=1e-2)


def score_error(p: LayerParams) -> float:
    k = keys(400, 2, 64, seed=11)
    q = torch.randn(400, 6, 64, generator=torch.Generator().manual_seed(5)) * torch.logspace(-1, 1, 64)
    codes, scale = codec.quantise(codec.transform_key(k, p), p)
    error = codec.dequantise(codes, scale) - codec.transform_key(k, p)
    turned = torch.einsum("thgd,hde->thge", q.unflatten(1, (2, 3)), p.query_matrix)
    return float(torch.einsum("qhgd,khd->hgqk", turned, error).square().mean().sqrt())


def test_each_step_lowers_the_error_of_scores() -> None:
    rotated = score_error(identity_params(2, 64, 64))
    balanced = score_error(calibrated(2, 64, feedback=False))
    shaped = score_error(calibrated(2, 64))
    assert balanced < 0.5 * rotated
    assert shaped < 0.9 * balanced


def test_the_sink_has_a_centre_of_its_own() -> None:
    p = calibrated(2, 64)
    first = keys(1, 2, 64, seed=21) + 30
    position = torch.zeros(1, dtype=torch.long)
    value = torch.zeros(1, 2, 64)
    codes, scale, _, _ = codec.encode(first, value, position, p)
    with_sink = codec.dequantise(codes, scale) + p.sink_key - codec.transform_key(first, p)
    codes, scale, _, _ = codec.encode(first, value, position + 5, p)
    without = codec.dequantise(codes, scale) - codec.transform_key(first, p)
    assert with_sink.norm() < 0.25 * without.norm()


def test_codes_and_scales_of_a_known_row() -> None:
    row = (torch.arange(64) % 16 - 7.5) * 0.25
    codes, scale = codec.quantise(row[None])
    assert torch.equal(codes[0], (torch.arange(64) % 16).to(torch.uint8))
    assert float(scale[0]) == 0.25
    assert torch.equal(codec.unpack_row(codec.pack_row(codes)), codes)
    assert codec.pack_row(codes)[0, 3] == 3 | (3 << 4)  # element 3 and element 35, both code 3


@pytest.mark.parametrize("size", [64, 128, 256])
def test_two_clips_do_nearly_as_well_as_six(size: int) -> None:
    x = torch.randn(20_000, size, generator=torch.Generator().manual_seed(8))
    peak = x.abs().amax(-1, keepdim=True)
    best = torch.full((len(x),), torch.inf)
    for step in range(6):
        s = peak * (1.0 - 0.08 * step) / 7.5
        codes = (x / s + 7.5).round().clamp(0, 15) - 7.5
        fitted = (x * codes).sum(-1, keepdim=True) / codes.square().sum(-1, keepdim=True)
        best = torch.minimum(best, (x - codes * fitted).square().sum(-1))
    got = (codec.dequantise(*codec.quantise(x)) - x).square().sum(-1)
    assert got.mean() < best.mean() * 1.008


def test_rows_of_zeros_and_of_huge_values_stay_finite() -> None:
    for row in (torch.zeros(1, 64), torch.full((1, 64), 3e4), torch.full((1, 64), 1e-7)):
        codes, scale = codec.quantise(row)
        back = codec.dequantise(codes, scale)
        assert torch.isfinite(back).all()
        assert (back - row).abs().max() <= 0.1 * row.abs().max() + 1e-6


def test_key_bias_is_the_data_free_centre() -> None:
    bias = torch.randn(8, 2, 64)
    p = bias_params(bias, 2, 64, 64)
    assert torch.allclose(p.key_centre, bias.mean(0), atol=1e-6)
    assert torch.equal(bias_params(None, 2, 64, 64).key_centre, torch.zeros(2, 64))


def test_files_keep_parameters_and_give_ranks_their_heads(tmp_path: Path) -> None:
    p = calibrated(4, 64)
    path = files.save(tmp_path / "c.safetensors", {"model.layers.0.attn": p}, {"model": "m"})
    loaded, metadata = files.load(path)
    assert metadata["model"] == "m"
    assert torch.equal(loaded["model.layers.0.attn"].key_matrix, p.key_matrix)
    second = files.shard(p, 2, rank=1, ranks=2)
    assert torch.equal(second.key_centre, p.key_centre[2:])
    repeated = files.shard(p, 1, rank=5, ranks=8)  # four heads on eight ranks: each held twice
    assert torch.equal(repeated.key_centre, p.key_centre[2:3])
    assert [f.name for f in tmp_path.iterdir()] == ["c.safetensors"]


def test_broken_files_are_refused(tmp_path: Path) -> None:
    path = files.save(tmp_path / "c.safetensors", {"l": calibrated(2, 64)}, {})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FourfoldError, match="cannot be read"):
        files.load(path)
    from safetensors.torch import save_file

    save_file({"l/key_centre": torch.zeros(2, 64)}, path, metadata={"format": files.FORMAT})
    with pytest.raises(FourfoldError, match="incomplete"):
        files.load(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(FourfoldError, match="not a calibration file"):
        files.load(path)


def test_parameters_of_another_shape_are_named() -> None:
    p = calibrated(2, 64)
    assert p.check(2, 64, 64) is None
    assert "key_centre" in str(p.check(3, 64, 64))
    assert "not finite" in str(replace(p, sink_value=p.sink_value / 0).check(2, 64, 64))
    assert "diagonal" in str(replace(p, query_factor=-p.query_factor).check(2, 64, 64))


def test_calibration_text(tmp_path: Path) -> None:
    assert len(read_text("")) > 8000
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(FourfoldError, match="too short"):
        read_text(str(short))
    with pytest.raises(FourfoldError, match="cannot be read"):
        read_text(str(tmp_path / "missing.txt"))
    windows = calibration_windows("", None, 512, 128)
    assert all(len(s) <= 128 for passes in windows for s in passes)
    assert sum(len(passes) for passes in windows) >= 32  # enough different first tokens for the sink


@pytest.mark.parametrize("size", HEAD_SIZES)
def test_page_has_no_padding(size: int) -> None:
    layout = PageLayout(48, 3, size, size)
    assert layout.bytes_per_token_head == size + 4
    assert layout.page_bytes == 48 * 3 * (size + 4)
    assert layout.v_scales_offset + 2 * 48 == layout.head_page_bytes
    assert round(PageLayout(16, 1, 128, 128).ratio(), 2) == 3.88
    assert round(PageLayout(16, 1, 64, 64).ratio(), 2) == 3.76


@pytest.mark.parametrize(("block", "heads", "size"), [(8, 1, 64), (40, 1, 64), (256, 1, 64), (16, 0, 64), (16, 1, 112)])
def test_layouts_no_kernel_handles_are_refused(block: int, heads: int, size: int) -> None:
    with pytest.raises(FourfoldError):
        PageLayout(block, heads, size, size)
