"""Converts between messages, text and tokens."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.text.chat import ChatTemplate as ChatTemplate
    from sagellm.engines.text.detokenizer import IncrementalDetokenizer as IncrementalDetokenizer
    from sagellm.engines.text.messages import ChatMessage as ChatMessage

__all__ = [
    "ChatMessage",
    "ChatTemplate",
    "IncrementalDetokenizer",
]

__getattr__ = lazy(
    __name__,
    {
        "ChatMessage": ".messages",
        "ChatTemplate": ".chat",
        "IncrementalDetokenizer": ".detokenizer",
    },
)
