"""What a body may contain of tools: every field bounded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sagellm.engines.text.chat_tools import MAX_TOOLS

MAX_CALLS = 128

FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool; the only type is a function."""

    type: Literal["function"]
    function: Function

    @property
    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates get it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a function."""

    name: FunctionName


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The choice of one function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that was called, with the JSON of its arguments."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call in a message of the assistant. Clients keep the `index` that it had in a stream."""

    id: CallId
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None

    @property
    def for_template(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


ToolCalls = Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
