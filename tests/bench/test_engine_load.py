"""Load against a real vLLM server, and streams that break off."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fourfold.bench import driver
from fourfold.bench.driver import shorten_idle, watch
from fourfold.bench.load import LoadSettings, run_load
from fourfold.bench.prompts import Prompt, select
from fourfold.bench.server import free_port, running_server
from fourfold.bench.showcase import server_environment
from fourfold.bench.tokenizer import encoder, load_tokenizer, renderer
from fourfold.cli.serve import server_command
from fourfold.config import Settings
from fourfold.evals.engine import SERVER_ENVIRONMENT, SERVER_FLAGS, ServedEngine, measure_windows
from fourfold.evals.windows import cut_windows, default_text
from fourfold.modes import MODES, environment

pytestmark = pytest.mark.engine

KV_BYTES = 2 * 2 * 2 * 64 * 4 * 32 * 12  # 2 layers, K and V, 2 heads, 64 elements of 4 bytes: 12 blocks of 32 tokens


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    flags = ["--port", str(port), "--dtype", "float32", "--max-model-len", "256", "--block-size", "32"]
    flags += ["--kv-cache-memory-bytes", str(KV_BYTES), "--enforce-eager", "--served-model-name", "tiny"]
    command = server_command(str(tiny_llama), [*flags, *SERVER_FLAGS], sys.executable)
    environ = {**environment(MODES["bf16"], Settings()), **SERVER_ENVIRONMENT, **server_environment(False)}
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(command, environ, log, port=port, timeout=300) as url:
        yield url


def test_a_run_measures_preempts_and_describes_the_engine(server: str, tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_llama))
    prompts = [Prompt(f"the river {n} rises and the boat {n} waits", "", 90) for n in range(60)]
    requests = select(prompts, 60, encoder(tokenizer), renderer(tokenizer), max_model_len=256)
    load = LoadSettings(request_rate=50.0, ignore_eos=True, temperature=1.0, max_degenerate=1.0, interval=0.05)
    result = run_load(server, requests, load, model="tiny", tokenizer=str(tiny_llama), timeout=300)
    assert (result["completed"], result["failed"], result["valid"]) == (60, 0, True)
    assert result["output_tokens"] == 60 * 90
    assert result["input_tokens"] == sum(request.prompt_tokens for request in requests)
    assert result["ttft_mean_s"] > 0
    assert len(result["requests"]["ttft_s"]) == 60
    # every request grows to four or five blocks of twelve: the cache fills, and requests are thrown out; sixty of them
    # keep a fast machine busy long enough for /metrics to be read
    assert result["engine"]["capacity_tokens"] == 12 * 32
    assert result["preemptions"] > 0
    assert result["kv_usage_peak"] > 0.7
    assert result["engine"]["version"].startswith("0.")
    assert max(result["series"]["waiting"]) > 0
    json.dumps(result, allow_nan=False)


def test_quality_of_a_server_is_that_of_the_model(server: str, tiny_llama: Path, tmp_path: Path) -> None:
    """As the demo measures it: after a load, through the server; against transformers, and against itself."""
    import torch
    from transformers import AutoModelForCausalLM

    windows = cut_windows(load_tokenizer(str(tiny_llama)), default_text(), 2, 96)
    engine, done = ServedEngine(server, "tiny"), []
    base = measure_windows(engine, windows, tmp_path, save=True, compare=False, progress=done.append)
    again = measure_windows(engine, windows, tmp_path, save=False, compare=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.no_grad():
        ids = torch.tensor(windows)
        nll = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].reshape(-1, 512), ids[:, 1:].reshape(-1))
    assert base["perplexity"] == pytest.approx(math.exp(float(nll)), rel=1e-4)
    assert (base["positions"], base["dtype"], done) == (2 * 95, "float32", [1, 2])
    assert again["perplexity"] == pytest.approx(base["perplexity"], rel=1e-6)
    assert abs(again["kl"]) < 1e-6
    assert again["top1_agreement"] == 1.0


async def _serve_stream(events: list[str]) -> asyncio.Server:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(length)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for event in events:
            writer.write(f"data: {event}\n\n".encode())
        await writer.drain()
        writer.close()

    return await asyncio.start_server(handle, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("reason", "success"), [("length", True), ("stop", True), (None, False), ("abort", False)], ids=str
)
def test_streams_without_an_end_are_errors(reason: str | None, success: bool) -> None:
    import aiohttp

    module = importlib.import_module("vllm.benchmarks.lib.endpoint_request_func")
    original = (module.StreamedResponseHandler, dict(module.ASYNC_REQUEST_FUNCS))
    watch(module)

    async def ask() -> object:
        events = [json.dumps({"choices": [{"text": "a", "finish_reason": None}]}) for _ in range(3)]
        if reason:
            events.append(json.dumps({"choices": [{"text": "", "finish_reason": reason}]}))
        stub = await _serve_stream(events)
        url = f"http://127.0.0.1:{stub.sockets[0].getsockname()[1]}/v1/completions"
        request = module.RequestFuncInput(prompt="x", api_url=url, prompt_len=1, output_len=4, model="m")
        async with stub, aiohttp.ClientSession() as session:
            return await module.ASYNC_REQUEST_FUNCS["openai"](request, session)

    try:
        output = asyncio.run(ask())
    finally:
        module.StreamedResponseHandler = original[0]
        module.ASYNC_REQUEST_FUNCS.update(original[1])
    assert output.success is success
    assert output.error.startswith("cut stream") is not success


@pytest.mark.parametrize(("pause", "connections"), [(0.0, 1), (0.4, 2)], ids=["busy", "idle"])
def test_connections_are_given_up_before_a_server_closes_them(
    pause: float, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import aiohttp

    monkeypatch.setattr(driver, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(aiohttp, "TCPConnector", aiohttp.TCPConnector)  # put back afterwards
    shorten_idle(aiohttp)
    accepted: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(1)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
        writer.close()

    async def ask() -> None:
        stub = await asyncio.start_server(handle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{stub.sockets[0].getsockname()[1]}/"
        connector = aiohttp.TCPConnector(keepalive_timeout=60)  # as vLLM's generator makes it
        async with stub, aiohttp.ClientSession(connector=connector) as session:
            for _ in range(2):
                async with session.post(url) as response:
                    assert response.status == 200
                await asyncio.sleep(pause)

    asyncio.run(ask())
    assert len(accepted) == connections
