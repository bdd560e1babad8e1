"""Runs vLLM's own load generator, ``vllm.benchmarks.serve``, in a process of its own.

``python -m fourfold.bench.driver``, then one line on its standard input: a JSON list, flags of ``vllm bench serve``.
vLLM is imported before the line is read, so that the tens of seconds which that takes can pass while a server starts.
Why not the ``vllm`` script: the one of the CPU wheel does not start.  One thing is added: vLLM counts a stream that
breaks off after its first token as a success, so every stream is watched for a ``finish_reason``, and one without
becomes an error that starts with ``answers.CUT``.  One thing is taken away: a connection that has been idle for
``IDLE_SECONDS`` is not used again (see there).

vLLM is loaded by name, when this module runs as a program; no module of ``fourfold.bench`` imports it.
"""

from __future__ import annotations

import contextvars
import importlib
import json
import sys
from typing import Any

from fourfold.bench.answers import CUT

IDLE_SECONDS = 2.0
"""How long a connection is kept for the next request.  vLLM's generator keeps it for 60 s and vLLM's server for 5
(``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``), so a request that comes 5 s after the last one can go into a connection that is
being closed; POST is not sent again, and an answer that the server never saw counts as failed."""

_finish: contextvars.ContextVar[list[str]] = contextvars.ContextVar("finish")


def finish_reasons(message: str) -> list[str]:
    """``finish_reason`` of every choice in one server-sent event that has one."""
    body = message.removeprefix("data:").strip()
    if "finish_reason" not in body:
        return []
    try:
        choices = json.loads(body).get("choices") or []
    except (ValueError, AttributeError):
        return []
    return [str(choice["finish_reason"]) for choice in choices if choice.get("finish_reason")]


def watch(module: Any) -> None:
    """Make every request function of vLLM's ``endpoint_request_func`` module report cut streams as errors."""
    handler = module.StreamedResponseHandler

    class Watching(handler):  # type: ignore[misc, valid-type]
        def add_chunk(self, chunk_bytes: bytes) -> list[str]:
            messages: list[str] = super().add_chunk(chunk_bytes)
            seen = _finish.get(None)
            if seen is not None:
                for message in messages:
                    seen.extend(finish_reasons(message))
            return messages

    def watched(function: Any) -> Any:
        async def call(request_func_input: Any, session: Any, pbar: Any = None) -> Any:
            reasons: list[str] = []
            _finish.set(reasons)  # asyncio gives every task its own context, so requests do not mix
            output = await function(request_func_input=request_func_input, session=session, pbar=pbar)
            if output.success and (not reasons or "abort" in reasons or "error" in reasons):
                output.success, output.error = False, f"{CUT}: finish_reason {reasons[-1] if reasons else 'missing'}"
            return output

        return call

    module.StreamedResponseHandler = Watching
    functions = module.ASYNC_REQUEST_FUNCS
    for name in ("vllm", "openai", "openai-chat"):
        if name in functions:
            functions[name] = watched(functions[name])


def shorten_idle(module: Any) -> None:
    """Make every connector of the ``aiohttp`` module drop idle connections before a server does."""
    connector = module.TCPConnector

    class ShortIdle(connector):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, keepalive_timeout: float = IDLE_SECONDS, **options: Any) -> None:
            super().__init__(*args, keepalive_timeout=min(keepalive_timeout, IDLE_SECONDS), **options)

    module.TCPConnector = ShortIdle


def run() -> None:
    """Import vLLM, then read the flags of ``vllm bench serve`` and run it; end if there are none."""
    watch(importlib.import_module("vllm.benchmarks.lib.endpoint_request_func"))
    shorten_idle(importlib.import_module("aiohttp"))
    serve = importlib.import_module("vllm.benchmarks.serve")
    parser_type = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    parser = parser_type(prog="vllm bench serve")
    serve.add_cli_args(parser)
    line = sys.stdin.readline()
    if line.strip():
        serve.main(parser.parse_args(json.loads(line)))


if __name__ == "__main__":
    run()
