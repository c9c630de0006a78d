"""Messages between front and core, typed, in MessagePack, one per frame. Imports no torch.

Both sides always have the same version: the front starts the core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from sagellm.core import FinishReason, Request, SequenceId, TokenOutput
from sagellm.core.protocols.engine import RequestLimits
from sagellm.engines.requests.queued_request import MAX_SEED, QueuedRequest
from sagellm.engines.sampling.params import SamplingParams
from sagellm.server.remote.frames import FrameReader as FrameReader, encode as encode


class Add(msgspec.Struct, frozen=True, tag="add", array_like=True):
    """To the core: queue the requests of a job. Their parameters cross the link, and are checked, once."""

    params: SamplingParams
    stop_token_ids: frozenset[int]
    prompts: list[tuple[Request, Annotated[int, Meta(ge=0, le=MAX_SEED)]]]  # with their seeds

    @classmethod
    def of(cls, requests: Sequence[QueuedRequest]) -> Self:
        """Return the message about requests with the same parameters, at least one."""
        first = requests[0]
        return cls(first.params, first.stop_token_ids, [(each.request, each.seed) for each in requests])

    def requests(self) -> Iterator[QueuedRequest]:
        """Yield the requests."""
        for request, seed in self.prompts:
            yield QueuedRequest(request, self.params, seed, self.stop_token_ids)


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """To the core: end these sequences; those that have already ended are skipped."""

    sequence_ids: list[SequenceId]
    finish_reason: FinishReason


class Call(msgspec.Struct, frozen=True, tag="call", array_like=True):
    """To the core: run an operation between two steps and answer with a Reply of the same number."""

    number: int
    operation: str
    arguments: dict[str, Any]


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """From the core, its first message: what it runs. Its model is loaded."""

    config: dict[str, Any]  # dotted keys, with what was chosen for "auto"
    limits: RequestLimits
    default_params: SamplingParams
    pid: int


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """From the core, instead of Hello: why it cannot start."""

    message: str
    is_usage_error: bool = False  # a setting is wrong


class Step(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """From the core: what a step did to the sequences of this connection."""

    outputs: list[TokenOutput]


class Reply(msgspec.Struct, frozen=True, tag="reply", array_like=True):
    """From the core: the answer to a Call, or why there is none."""

    number: int
    result: Any = None
    error: str | None = None


ToCore = Add | Abort | Call
FromCore = Hello | Failed | Step | Reply
