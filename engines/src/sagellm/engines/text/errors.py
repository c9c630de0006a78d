"""Errors of a checkpoint's chat template and tokenizer.

InvalidRequestError
└── ForeignTextError          either failed on this request; the next one may succeed
    ├── ChatTemplateError     the template refused the messages, or is wrong
    ├── TokenizerError        the tokenizer raised, or panicked
    └── TextLimitError        either exceeded its time, memory or output

EngineError
└── TextBusyError             no worker became free; the request may be retried
"""

from __future__ import annotations

from sagellm.core import EngineError, InvalidRequestError


class ForeignTextError(InvalidRequestError):
    """A template or tokenizer failed on one request.

    A server sends `summary` to its callers; `detail`, which may quote the checkpoint, is only logged.
    """

    def __init__(self, summary: str, detail: str = "") -> None:
        super().__init__(f"{summary}: {detail}" if detail else summary)
        self.summary = summary
        self.detail = detail


class ChatTemplateError(ForeignTextError):
    """The model's chat template refused the messages, or could not render them."""


class TokenizerError(ForeignTextError):
    """The model's tokenizer failed on a text or on tokens."""


class TextLimitError(ForeignTextError):
    """A template or tokenizer exceeded its limit on time, memory or output."""


class TextBusyError(EngineError):
    """No worker became free in time; the request may be retried."""
