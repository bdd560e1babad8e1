"""vLLM's scheduler with Fourfold's order, admission and victims: ``--scheduler-cls`` takes either class here.

Nothing of ``Scheduler.schedule`` is copied.  The seams are vLLM's own methods (``compat.SCHEDULER_SEAMS``):

* the waiting queue is a ``RequestQueue`` of ours, whose truth value is admission (see ``queue.py``);
* vLLM's branch for the policy "priority" preempts the running request with the greatest ``priority`` and gives back
  what it was scheduled for; before a step that could run out of blocks, ``priority`` holds the place among victims;
* ``_preempt_request``, ``_free_request`` and ``_update_request_as_session`` are where a request changes its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from fourfold.config import Settings
from fourfold.rank.admission import Pool
from fourfold.vllm_plugin.compat import blocked_check, check_scheduler
from fourfold.vllm_plugin.queue import RankedQueue
from fourfold.vllm_plugin.rank_metrics import RankMetrics
from fourfold.vllm_plugin.ranking import LengthRecorder, Ranking, prompt_text


class RankedMixin(Scheduler):
    """The logic, for both of vLLM's schedulers (``AsyncScheduler`` is a ``Scheduler``, so super() finds it first).

    With ``FOURFOLD_RANKER=off`` every method hands on to vLLM's and nothing else is different.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Either name gives the class that fits the engine: vLLM decides late whether it schedules ahead."""
        config: VllmConfig = kwargs.get("vllm_config") or args[0]
        fitting = RankedAsyncScheduler if config.scheduler_config.async_scheduling else RankedScheduler
        if cls is not fitting and cls in (RankedScheduler, RankedAsyncScheduler):
            return fitting(*args, **kwargs)
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_scheduler(Scheduler)
        super().__init__(*args, **kwargs)
        settings = Settings.from_env()
        off = settings.ranker == "off"
        text = None if off and not settings.record_lengths else prompt_text(self.vllm_config.model_config)
        self._recorder: LengthRecorder | None = None
        if settings.record_lengths:
            self._recorder = LengthRecorder(
                Path(settings.record_lengths).expanduser(), text, with_prompts=settings.record_prompts
            )
        self._ranking = None if off else Ranking.from_settings(settings, text)
        self._emptying = False
        if self._ranking is not None:
            self._take_over(self._ranking)

    def _take_over(self, ranking: Ranking) -> None:
        """Put our queues in place of vLLM's, and work out what does not change."""
        self.policy = SchedulingPolicy.PRIORITY
        self.waiting = RankedQueue(ranking.key, self._may_take)
        self._queues = [self.waiting]
        if hasattr(self, "skipped_waiting"):  # in some versions those that were skipped wait apart
            self.skipped_waiting = RankedQueue(ranking.key, self._may_take)
            self._queues.append(self.skipped_waiting)
        groups = self.kv_cache_config.kv_cache_groups
        block = min(group.kv_cache_spec.block_size for group in groups)
        self._group_count, self._smallest_block = max(1, len(groups)), block
        ahead = 1 + self.num_spec_tokens if isinstance(self, AsyncScheduler) else 0
        spare = self.num_spec_tokens + self.num_lookahead_tokens + ahead
        self._blocks_a_step = self._group_count * (1 + -(-(1 + spare) // block))
        self._blocks_a_prefill = self._group_count * -(-self.max_num_scheduled_tokens // block)
        self._spare_tokens = spare
        self._metrics = RankMetrics(ranking, self.vllm_config) if self.log_stats else None

    # What vLLM asks

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        ranking = self._ranking
        if ranking is None:
            return super().schedule(*args, **kwargs)
        if ranking.order_changed(chain(*self._queues)):
            for queue in self._queues:
                queue.sort_again()
        kept = ranking.give_way(self.running) if self._blocks_may_run_out() else None
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            if kept:
                ranking.restore(kept)
        if output.scheduled_new_reqs:
            ranking.started(request.req_id for request in output.scheduled_new_reqs)
        if self._metrics is not None:
            self._metrics.tick()
        return output

    def add_request(self, request: Request) -> None:
        if self._ranking is not None and request.request_id not in self.requests:
            self._ranking.arrived(request)
        super().add_request(request)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._emptying = True
        try:
            return super().reset_prefix_cache(*args, **kwargs)
        finally:
            self._emptying = False

    def shutdown(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        super().shutdown()

    # Where a request changes its state

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self._ranking is not None:
            self._ranking.preempted(request, counted=not self._emptying)
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._recorder is not None:
            self._recorder.ended(request)
        if self._ranking is not None:
            self._ranking.ended(request)
            if self._metrics is not None and not self._ranking.policy.jobs:
                self._metrics.publish()  # no step may follow for long
        return super()._free_request(request, *args, **kwargs)

    def _update_request_as_session(self, session: Request, *args: Any, **kwargs: Any) -> None:
        super()._update_request_as_session(session, *args, **kwargs)
        if self._ranking is None:
            return
        self._ranking.arrived(session)
        for queue in self._queues:
            if session in queue:
                queue.remove_request(session)
                queue.add_request(session)

    def _select_waiting_queue_for_scheduling(self) -> Any:
        """Where there are two queues: which of them the next request comes from."""
        if self._ranking is None:
            return super()._select_waiting_queue_for_scheduling()
        return self._first_queue()

    # Admission and victims

    def _first_queue(self) -> RankedQueue:
        return min((queue for queue in self._queues if len(queue)), key=RankedQueue.first_key)

    def _may_take(self) -> bool:
        """Whether vLLM's pass may go on to the first waiting request.  It may, too, where vLLM will stop or skip it."""
        assert self._ranking is not None
        request = self._first_queue().peek_request()
        active = len(self.running) + self.num_waiting_for_streaming_input
        if active >= getattr(self, "max_num_active_reqs", self.max_num_running_reqs) or not self.running:
            return True
        if request.num_computed_tokens > 0 or not self._is_ready(request):
            return True
        free = self.kv_cache_manager.block_pool.get_num_free_blocks() // self._group_count
        return self._ranking.may_start(request, self._holders(), self._pool(), free)

    def _is_ready(self, request: Request) -> bool:
        """Whether the request waits for nothing but its turn; vLLM's own check, which may be asked twice."""
        if not self._is_blocked_waiting_status(request.status):
            return True
        promote = blocked_check(self)
        assert promote is not None  # check_scheduler saw to it
        return bool(promote(request)) and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)

    def _holders(self) -> Iterator[Request]:
        """Requests that hold KV: the running ones, and where vLLM has such, the waiting ones that kept theirs."""
        return chain(self.running, getattr(self, "kv_holding_waiting", ()))

    def _pool(self) -> Pool:
        """The pool as one group of layers sees it; groups share it evenly."""
        blocks = self.kv_cache_manager.block_pool
        total = blocks.num_gpu_blocks - 1  # one is vLLM's null block
        shared = 0
        if self.kv_cache_manager.enable_caching:
            size = self.block_size
            computed = sum(-(-request.num_computed_tokens // size) for request in self._holders())
            shared = max(0, computed - (total - blocks.get_num_free_blocks()) // self._group_count)
        return Pool(total // self._group_count, self.block_size, self._spare_tokens, shared)

    def _blocks_may_run_out(self) -> bool:
        """Whether this step could need more blocks than are free: two bounds from above; the first costs nothing.

        A full pool never passes the first, and ranking victims for nothing costs more than the second: the blocks into
        which the running requests can grow in this step.
        """
        running, free = len(self.running), self.kv_cache_manager.block_pool.get_num_free_blocks()
        prefills = self._blocks_a_prefill if self._inflight_prefills else 0
        if running <= 1 or free >= running * self._blocks_a_step + prefills:
            return False
        size, ahead = self._smallest_block, 1 + self._spare_tokens
        tokens = [request.num_computed_tokens for request in self.running]
        grown = sum((n + ahead - 1) // size - (n - 1) // size for n in tokens)
        return free < self._group_count * grown + prefills


class RankedScheduler(RankedMixin, Scheduler):
    """For engines that wait for each step's output, as on a CPU."""


class RankedAsyncScheduler(RankedMixin, AsyncScheduler):
    """For engines that schedule the next step while one runs."""
