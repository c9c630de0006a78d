"""What front and worker say to each other, in frames of msgpack."""

from __future__ import annotations

from typing import Literal

import msgspec

from sagellm.engines.text.calls import Decode, Encode, EncodeBadWords, Render
from sagellm.engines.text.limits import Limits


class Failure(msgspec.Struct, frozen=True):
    """Why a call has no result; `kind` chooses the error that the front raises."""

    kind: Literal["template", "tokenizer", "limit", "request", "internal"]
    summary: str
    detail: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call: one of the first three, none for Limits. After the last one the worker ends."""

    token_ids: list[list[int]] | None = None
    text: str | None = None
    failure: Failure | None = None
    is_last: bool = False


ToWorker = Limits | Render | Encode | EncodeBadWords | Decode
