"""What stands in the text of an answer: tool calls and reasoning, by the formats of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.parsers.answers import (
        Answer as Answer,
        ToolCall as ToolCall,
        parse_tool_calls as parse_tool_calls,
    )

_TABLE = {"Answer": ".answers", "ToolCall": ".answers", "parse_tool_calls": ".answers"}

__all__ = sorted(_TABLE)

__getattr__ = lazy(__name__, _TABLE)
