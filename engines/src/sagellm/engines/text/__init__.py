"""Converts between messages, text and tokens."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.text.chat_messages import ChatMessage as ChatMessage
    from sagellm.engines.text.chat_template import ChatTemplate as ChatTemplate
    from sagellm.engines.text.detokenizer import IncrementalDetokenizer as IncrementalDetokenizer

_MODULE_OF = {
    "ChatMessage": ".chat_messages",
    "ChatTemplate": ".chat_template",
    "IncrementalDetokenizer": ".detokenizer",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
