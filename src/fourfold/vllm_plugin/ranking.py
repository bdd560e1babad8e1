"""What the ranked scheduler knows about its requests: the policy's jobs, the ranker, and the trace of lengths.

Everything here sees vLLM's ``Request`` objects and none of its scheduler; ``scheduler.py`` says when.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import Request, RequestStatus

from fourfold.config import Settings
from fourfold.errors import FourfoldError
from fourfold.rank.admission import Pool
from fourfold.rank.base import Ranker
from fourfold.rank.policy import Job, Policy, PolicyConfig
from fourfold.rank.registry import load_ranker
from fourfold.rank.trace import TraceWriter
from fourfold.vllm_plugin.prompt_text import PromptText
from fourfold.vllm_plugin.queue import Key

logger = init_logger("vllm.fourfold")


def prompt_text(model_config: Any) -> PromptText | None:
    """The text reader for a model, or None with one warning where the engine has no tokenizer."""
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = None
    try:
        tokenizer = cached_tokenizer_from_config(model_config)
        why = "the engine was started without a tokenizer (--skip-tokenizer-init)"
    except Exception as error:
        why = str(error)
    if tokenizer is None:
        logger.warning("Prompts cannot be turned into text, so they have no rank: first-come. Why: %s", why)
        return None
    return PromptText(tokenizer)


class Ranking:
    """The policy, driven by requests."""

    def __init__(
        self, policy: Policy, text: PromptText | None, *, oracle: bool = False, clock: Any = time.monotonic
    ) -> None:
        """``oracle``: take max_tokens of ignore_eos requests for their length.  ``clock``: seconds, never back."""
        self.policy, self.clock, self._oracle = policy, clock, oracle
        self._text = text
        self._epoch = policy.epoch
        self.text_s = 0.0
        """Seconds spent on turning tokens into text."""

    @classmethod
    def from_settings(cls, settings: Settings, text: PromptText | None) -> Ranking:
        """Load the ranker.

        Raises:
            FourfoldError: if it cannot be used, unless ``settings.ranker_optional``.
        """
        oracle = settings.ranker == "oracle"
        # the oracle needs no score; what counts as a long answer it takes from the embedded ranker
        path = "default" if oracle else settings.ranker
        ranker: Ranker | None = load_ranker(path, device=settings.ranker_device, required=not settings.ranker_optional)
        config = PolicyConfig(
            max_overtake_s=settings.max_overtake_s,
            max_preemptions=settings.max_preemptions,
            trust_max_tokens=settings.trust_max_tokens,
            answer_limit=settings.answer_limit,
        )
        return cls(Policy(ranker, config), text, oracle=oracle)

    def job(self, request: Request) -> Job:
        return self.policy.jobs[request.request_id]

    def jobs(self, requests: Iterable[Request]) -> list[Job]:
        """Their jobs, brought up to date."""
        known, jobs = self.policy.jobs, []
        for request in requests:
            job = known[request.request_id]
            job.generated = request.num_output_tokens
            jobs.append(job)
        return jobs

    def arrived(self, request: Request) -> None:
        """A new request, or the next turn of a streaming session, whose earlier turn is forgotten."""
        earlier = self.policy.jobs.get(request.request_id)
        if earlier is not None:
            self.policy.abort(earlier)
        sampling = request.sampling_params
        known = request.max_tokens if self._oracle and sampling is not None and sampling.ignore_eos else None
        self.policy.add(
            request.request_id,
            self._prompt(request) if known is None and sampling is not None else None,
            prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            arrival=self.clock(),
            priority=request.priority,
            known_tokens=known,
        )

    def _prompt(self, request: Request) -> str | None:
        ids = request.prompt_token_ids
        if self._text is None or self.policy.ranker is None or not ids:
            return None
        began = time.perf_counter()
        try:
            return self._text(ids)
        except Exception as error:  # no rank is better than no engine
            logger.warning_once("A prompt cannot be turned into text: %s", str(error))
            return None
        finally:
            self.text_s += time.perf_counter() - began

    def key(self, request: Request) -> Key:
        """Sort key in a waiting queue.  Requests that hold KV come first: others wait for what they hold."""
        holds = request.num_computed_tokens > 0 or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        return (0 if holds else 1, *self.policy.order(self.job(request)))

    def order_changed(self, waiting: Iterable[Request]) -> bool:
        """Whether ranking went off or on since the last call; if so, ``waiting`` get new keys."""
        if self._epoch == self.policy.epoch:
            return False
        self._epoch = self.policy.epoch
        for request in waiting:
            self.policy.refresh(self.job(request))
        how = (
            "by predicted work again"
            if self.policy.ranking
            else "first-come: the ranker's tau is noise on this traffic"
        )
        logger.info("Requests are now ordered %s.", how)
        return True

    def may_start(self, request: Request, running: Iterable[Request], pool: Pool, free_blocks: int) -> bool:
        """Whether the first waiting request may start beside the running ones."""
        job = self.job(request)
        job.generated = request.num_output_tokens
        room = pool.blocks(request.num_tokens) <= free_blocks
        return self.policy.may_start(job, self.jobs(running), pool, room=room)

    def started(self, request_ids: Iterable[str]) -> None:
        """These requests were scheduled; only a request's first time counts."""
        now = None
        for request_id in request_ids:
            job = self.policy.jobs.get(request_id)
            if job is not None and job.started is None:
                now = self.clock() if now is None else now
                self.policy.start(job, now)

    def give_way(self, running: Sequence[Request]) -> dict[Request, int]:
        """Write each running request's place among the victims into its ``priority``, where vLLM looks for it.

        The greater goes first; protected requests have 0, so they go only when nobody else is left.

        Returns:
            the priorities that the requests had, for ``restore``.
        """
        kept = {request: request.priority for request in running}
        places = {
            job.request_id: place for place, job in enumerate(reversed(self.policy.victims(self.jobs(running))), 1)
        }
        for request in running:
            request.priority = places.get(request.request_id, 0)
        return kept

    @staticmethod
    def restore(kept: dict[Request, int]) -> None:
        for request, priority in kept.items():
            request.priority = priority

    def preempted(self, request: Request, *, counted: bool = True) -> None:
        """Before the request is queued again."""
        job = self.job(request)
        job.generated = request.num_output_tokens
        self.policy.preempt(job, counted=counted)

    def ended(self, request: Request) -> None:
        """The request is finished, in whatever state it was.

        Learnt from: an answer that the model ended, and one of ignore_eos, which is as long as it was meant to be.
        One cut at its limit, or ended by a stop string (the API server finds those and aborts the request here), was
        at least that long.  A client that went away teaches nothing.
        """
        job = self.policy.jobs.get(request.request_id)
        if job is None:
            return
        status, sampling = request.status, request.sampling_params
        job.generated = request.num_output_tokens
        if sampling is None or not job.generated:
            self.policy.abort(job)
        elif status == RequestStatus.FINISHED_STOPPED:
            self.policy.finish(job, job.generated)
        elif status == RequestStatus.FINISHED_LENGTH_CAPPED:
            self.policy.finish(job, job.generated, complete=bool(sampling.ignore_eos))
        elif status == RequestStatus.FINISHED_REPETITION or (
            status == RequestStatus.FINISHED_ABORTED and sampling.stop
        ):
            self.policy.finish(job, job.generated, complete=False)
        else:
            self.policy.abort(job)


class LengthRecorder:
    """Writes a line of a trace for every finished request (``rank.trace``)."""

    def __init__(self, path: Path, text: PromptText | None, *, with_prompts: bool) -> None:
        """Raises FourfoldError where the file cannot be written or prompts cannot be read."""
        if text is None:
            raise FourfoldError(
                "lengths cannot be recorded",
                why="the engine has no tokenizer, and a trace holds features of the prompts' text",
                fix="start the engine with a tokenizer, or leave --record-lengths out",
            )
        self._writer: TraceWriter | None = TraceWriter(path, with_prompts=with_prompts)
        self._text, self._with_prompts = text, with_prompts

    def ended(self, request: Request) -> None:
        """Append the request, unless it produced nothing or has no text."""
        ids = request.prompt_token_ids
        if self._writer is None or not ids or not request.num_output_tokens:
            return
        try:
            prompt = self._text.whole(ids) if self._with_prompts else self._text(ids)
            self._writer.write(
                prompt,
                prompt_tokens=request.num_prompt_tokens,
                output_tokens=request.num_output_tokens,
                finish=str(request.get_finished_reason()),
            )
        except Exception as error:  # a full disk must not end the service
            logger.warning("Lengths are no longer recorded: %s", error)
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
