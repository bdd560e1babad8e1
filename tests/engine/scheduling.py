"""vLLM's real scheduler without an engine: a tiny KV pool, requests made here, and a model that is a dice."""

from __future__ import annotations

import json
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from fourfold.rank.base import Ranker
from fourfold.rank.lengthmap import LengthMap
from fourfold.rank.policy import Policy, PolicyConfig
from fourfold.vllm_plugin.ranking import Ranking

from .conftest import llama_config

BLOCK = 16
EOS = 2


class NumberRanker(Ranker):
    """The prompt is the expected length."""

    name = "number"

    def __init__(self, longest: int = 400) -> None:
        scores = np.linspace(1, longest, 1600)
        self.lengths = LengthMap.fit(scores, scores)

    def score(self, prompts):
        return np.array([float(p) for p in prompts])


class FirstToken:
    """Text of a prompt: its first token's number."""

    def __call__(self, ids):
        return str(ids[0])


class Clock:
    """Seconds that pass when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_config(
    *, blocks: int, max_seqs: int = 16, batched_tokens: int = 128, max_len: int = 512, prefix: bool = False,
    asynchronous: bool = False,
) -> VllmConfig:  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="fourfold-scheduler-"))
    (folder / "config.json").write_text(json.dumps(llama_config(64, 1, max_position_embeddings=max_len)))
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=max_len)
    scheduler = SchedulerConfig(
        max_num_seqs=max_seqs,
        max_num_batched_tokens=batched_tokens,
        max_model_len=max_len,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
    )
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix)
    config = VllmConfig(
        model_config=model, cache_config=cache, scheduler_config=scheduler, device_config=DeviceConfig("cpu")
    )
    # the CPU platform switches it off for its own engine; the scheduler itself does not care where it runs
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.num_gpu_blocks = blocks
    return config


def make_scheduler(cls: type, config: VllmConfig, **more: Any) -> Any:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    kv = KVCacheConfig(
        num_blocks=config.cache_config.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return cls(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        **{"log_stats": True, **more},
    )


def ranked(scheduler: Any, clock: Clock, policy: PolicyConfig | None = None, longest: int = 400) -> Any:
    """Give a ranked scheduler a ranker that reads the expected length from a prompt's first token."""
    scheduler._ranking = Ranking(Policy(NumberRanker(longest), policy), FirstToken(), clock=clock)
    scheduler._take_over(scheduler._ranking)
    return scheduler


_hash = get_hash_fn_by_name("sha256")
init_none_hash(_hash)
_hasher = get_request_block_hasher(BLOCK, _hash)


def make_request(
    name: str, ids: list[int], *, max_tokens: int = 64, priority: int = 0, arrival: float = 0.0, **sampling: Any
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)
    params.update_from_generation_config({}, EOS)
    return Request(
        request_id=name, prompt_token_ids=ids, sampling_params=params, pooling_params=None, arrival_time=arrival,
        priority=priority, block_hasher=_hasher,
    )  # fmt: skip


def waiting(scheduler: Any) -> list[Request]:
    """Everybody who waits, in vLLM 0.25's two queues or in 0.32's."""
    queues = ("waiting", "skipped_waiting", "kv_holding_waiting")
    return [request for name in queues for request in getattr(scheduler, name, ())]


class Engine:
    """The loop of vLLM's engine core; ``ahead`` steps are scheduled before the first one's output is processed."""

    def __init__(self, scheduler: Any, clock: Clock, *, ahead: int = 0) -> None:
        self.scheduler, self.clock, self.ahead = scheduler, clock, ahead
        self.flight: deque[tuple[Any, dict[str, int]]] = deque()
        self.lengths: dict[str, int] = {}
        self.finished: dict[str, int] = {}
        """Output tokens that clients received, by request, and the requests that ended."""
        self.received: dict[str, list[int]] = {}

    def add(self, request: Request, length: int) -> None:
        """A request whose answer has ``length`` tokens, the last an EOS (max_tokens may cut it)."""
        self.lengths[request.request_id] = length
        self.received[request.request_id] = []
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self, seconds: float = 0.01) -> Any:
        """Schedule a step; process the output of the one that is then due.  Returns the step's SchedulerOutput."""
        self.clock.now += seconds
        output = self.scheduler.schedule()
        requests = self.scheduler.requests
        # who samples in this step: requests whose last known token is computed by it
        samples = {
            name: requests[name].num_output_tokens + requests[name].num_output_placeholders
            for name in output.num_scheduled_tokens
            if not requests[name].is_prefill_chunk
        }
        self.flight.append((output, samples))
        while len(self.flight) > (self.ahead if output.total_num_scheduled_tokens else 0):
            self._process(*self.flight.popleft())
        return output

    def _process(self, output: Any, samples: dict[str, int]) -> None:
        names = list(output.num_scheduled_tokens)
        tokens = []
        for name in names:
            if name not in samples:
                tokens.append([])
                continue
            # with placeholders counted, this is the place of the token that the step samples
            place = samples[name] if self.ahead else samples[name] + 1
            tokens.append([EOS if place >= self.lengths[name] else 100 + place % 50])
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        if not names:
            return
        for core in self.scheduler.update_from_output(output, result).values():
            for one in core.outputs:
                self.received[one.request_id].extend(one.new_token_ids)
                if one.finish_reason is not None:
                    assert one.request_id not in self.finished, "finished twice"
                    self.finished[one.request_id] = len(self.received[one.request_id])

    def used_blocks(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
