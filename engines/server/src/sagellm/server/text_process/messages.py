"""Messages between front and worker, in MessagePack frames."""

from __future__ import annotations

from typing import Literal

import msgspec

from sagellm.engines.text.calls import Decode, Encode, EncodeBadWords, Render
from sagellm.engines.text.limits import TextLimits


class Failure(msgspec.Struct, frozen=True):
    """Why a call failed; `kind` selects the exception that the front raises."""

    kind: Literal["template", "tokenizer", "limit", "request", "internal"]
    summary: str
    detail: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a call, with one of the first three fields set, or to TextLimits, with none.

    The worker ends after an answer that `is_last`.
    """

    token_ids: list[list[int]] | None = None
    text: str | None = None
    failure: Failure | None = None
    is_last: bool = False


ToWorker = TextLimits | Render | Encode | EncodeBadWords | Decode
