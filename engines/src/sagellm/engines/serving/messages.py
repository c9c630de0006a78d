"""Messages between front and core, typed, in MessagePack, one per frame.

Both sides always have the same version: the front starts the core.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sagellm.core import FinishReason, Namespace, RequestId, SequenceId, TokenOutput
from sagellm.engines.request_checks import MAX_NAME_CHARACTERS
from sagellm.engines.sampling.params import MAX_N, SamplingParams
from sagellm.engines.serving.calls import (
    Call as Call,
    Failed as Failed,
    Hello as Hello,
    Reply as Reply,
)
from sagellm.engines.serving.frames import FrameReader as FrameReader, encode as encode

_SequenceName = Annotated[SequenceId, Meta(min_length=1, max_length=MAX_NAME_CHARACTERS + 8)]
_Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that passed all checks. Its sequences share everything but their id and seed."""

    request_id: RequestId
    token_ids: bytes  # packed int32
    max_tokens: Annotated[int, Meta(ge=1)]
    priority: int
    arrival_ns: Annotated[int, Meta(ge=0)]  # of the clock that all processes of a machine share
    namespace: Namespace
    params: SamplingParams
    stop_token_ids: frozenset[int]
    sequences: Annotated[list[tuple[_SequenceName, _Seed]], Meta(min_length=1, max_length=MAX_N)]


class Add(msgspec.Struct, frozen=True, tag="add", array_like=True):
    """To the core: queue these."""

    requests: list[NewRequest]


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """To the core: end these sequences; those that have ended are passed over."""

    sequence_ids: list[SequenceId]
    finish_reason: FinishReason


class Step(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """From the core: what a step did to the sequences of this connection."""

    outputs: list[TokenOutput]


ToCore = Add | Abort | Call
FromCore = Hello | Failed | Step | Reply
