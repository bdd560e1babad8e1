"""A waiting queue in the policy's order, in the shape of vLLM's ``RequestQueue``."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

Key = tuple[int | float, ...]


class RankedQueue(RequestQueue):
    """A heap of requests under keys that are computed when they enter.

    A request that leaves from the middle (an abort) stays in the heap as a dead entry until it comes to the top
    or until half of the heap is dead, so that leaving costs no search.

    **Truth value.**  vLLM's scheduling pass reads ``while queue: take its first``.  ``bool(queue)`` therefore says
    whether a request may be *taken*, which is where admission sits: a queue whose first request must wait for KV
    is False, and the pass ends.  ``len(queue)`` counts requests, and that is what vLLM's statistics and its question
    whether there is work use.
    """

    def __init__(self, key: Callable[[Request], Key], may_take: Callable[[], bool]) -> None:
        """``key``: sort key of a request, unique, smallest first; ``may_take``: asked while the queue is not empty."""
        self._key, self._may_take = key, may_take
        self._heap: list[tuple[Key, Request]] = []
        self._live: dict[Request, Key] = {}

    def add_request(self, request: Request) -> None:
        key = self._key(request)
        self._live[request] = key
        heapq.heappush(self._heap, (key, request))

    def prepend_request(self, request: Request) -> None:
        """The same as adding: only the key says who is first."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def first_key(self) -> Key:
        """Key of the first request; IndexError if there is none."""
        heap, live = self._heap, self._live
        # a request that left and came back under another key has a dead entry under the old one
        while heap and live.get(heap[0][1]) is not heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0]

    def peek_request(self) -> Request:
        self.first_key()
        return self._heap[0][1]

    def pop_request(self) -> Request:
        self.first_key()
        request = heapq.heappop(self._heap)[1]
        del self._live[request]
        return request

    def remove_request(self, request: Request) -> None:
        """Remove a request; ValueError if it is not here (as a list would)."""
        if self._live.pop(request, None) is None:
            raise ValueError(f"{request.request_id} is not in the queue")
        self._bury()

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove those of the requests that are here."""
        for request in requests:
            self._live.pop(request, None)
        self._bury()

    def _bury(self) -> None:
        if len(self._heap) > 2 * len(self._live) + 16:
            self._rebuild()

    def sort_again(self) -> None:
        """Compute every key again."""
        for request in self._live:
            self._live[request] = self._key(request)
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(key, request) for request, key in self._live.items()]
        heapq.heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._live) and self._may_take()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: object) -> bool:
        return request in self._live

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._live, key=self._live.__getitem__))
