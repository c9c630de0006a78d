"""Errors of what a checkpoint brings along for text: its chat template and its tokenizer.

InvalidRequestError
└── ForeignTextError          it failed on this request; the next one may be fine
    ├── ChatTemplateError     the template refuses the messages, or is wrong
    ├── TokenizerError        the tokenizer raised, or panicked
    └── TextLimitError        either took more time, memory or output than it may

EngineError
└── TextBusyError             all processes for texts have been busy for long; the request may be sent again
"""

from __future__ import annotations

from sagellm.core import EngineError, InvalidRequestError


class ForeignTextError(InvalidRequestError):
    """A template or tokenizer failed on one request; `summary` is the message without its insides.

    A server tells its callers the summary alone: who may ask need not know the checkpoint.
    """

    def __init__(self, summary: str, detail: str = "") -> None:
        super().__init__(f"{summary}: {detail}" if detail else summary)
        self.summary = summary
        self.detail = detail


class ChatTemplateError(ForeignTextError):
    """The model's chat template refuses the messages, or cannot render them."""


class TokenizerError(ForeignTextError):
    """The model's tokenizer failed on a text or on tokens."""


class TextLimitError(ForeignTextError):
    """A template or tokenizer took more time, memory or output than it may."""


class TextBusyError(EngineError):
    """All processes for texts have been busy for long; the request may be sent again."""
