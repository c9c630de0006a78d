"""What an engine does for those who send it requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sagellm.core.errors import UnknownRequestError
from sagellm.core.ids import RequestId
from sagellm.core.namespace import DEFAULT, Namespace
from sagellm.core.tokens import TokenIdsLike

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds, inclusive, of the tokens that a step computes, by which `steps_by_tokens` counts."""


@dataclass(kw_only=True)
class EngineMetrics:
    """A snapshot of an engine: its own counts, then each module's under its kind."""

    num_running: int = 0
    num_waiting: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_computed_tokens: int = 0  # in all steps
    # Steps that computed something, by STEP_TOKEN_BOUNDS, and those above the last bound.
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKEN_BOUNDS) + 1))
    modules: dict[str, Any] = field(default_factory=dict)

    @property
    def num_held_blocks(self) -> int:
        """KV blocks that requests hold: those in use, without what is cached and locked by nobody."""
        pool, cache = self.modules.get("kv_pool"), self.modules.get("prefix_cache")
        reclaimable = getattr(cache, "num_blocks", 0) - getattr(cache, "num_locked_blocks", 0)
        return max(0, getattr(pool, "num_used_blocks", 0) - reclaimable)


class EngineProtocol(ABC):
    """Takes requests and produces their outputs step by step.

    Providers are called as `factory(config)`. `add_request` checks everything and queues;
    nothing runs until `step`. `step` never raises for the fault of one request: that one ends
    with the reason "error" and the others go on. Not safe for several threads; the asynchronous
    engine keeps one.
    """

    @abstractmethod
    def add_request(
        self,
        prompt: str | TokenIdsLike,
        params: Any = None,
        *,
        request_id: str | None = None,
        namespace: Namespace = DEFAULT,
        priority: int = 0,
    ) -> RequestId:
        """Queue a request and return its id. Raises InvalidRequestError, and nothing is kept."""

    @abstractmethod
    def abort_request(self, request_id: str) -> None:
        """End a request and free its blocks. Raises UnknownRequestError if it is not live."""

    @abstractmethod
    def step(self) -> Sequence[Any]:
        """Run one step and return the outputs of the requests that got tokens or ended."""

    @abstractmethod
    def has_unfinished_requests(self) -> bool:
        """Say whether `step` has anything left to do."""

    @abstractmethod
    def metrics(self) -> EngineMetrics:
        """Return a snapshot."""


class NullEngine(EngineProtocol):
    """Accepts requests and ends each with no output at the next step."""

    def __init__(self, config: object = None) -> None:
        del config
        self._waiting: list[RequestId] = []
        self._num_made = 0
        self._num_finished = 0

    def add_request(
        self,
        prompt: str | TokenIdsLike,
        params: Any = None,
        *,
        request_id: str | None = None,
        namespace: Namespace = DEFAULT,
        priority: int = 0,
    ) -> RequestId:
        """Queue an id."""
        self._num_made += 1
        made = RequestId(request_id or f"null-{self._num_made}")
        self._waiting.append(made)
        return made

    def abort_request(self, request_id: str) -> None:
        """Forget an id."""
        if request_id not in self._waiting:
            raise UnknownRequestError(f"no live request has the id {request_id!r}")
        self._waiting.remove(RequestId(request_id))

    def step(self) -> Sequence[RequestId]:
        """Return the ids that were waiting."""
        ended, self._waiting = self._waiting, []
        self._num_finished += len(ended)
        return ended

    def has_unfinished_requests(self) -> bool:
        """Whether an id waits."""
        return bool(self._waiting)

    def metrics(self) -> EngineMetrics:
        """Return the counts."""
        return EngineMetrics(num_waiting=len(self._waiting), num_finished=self._num_finished)
