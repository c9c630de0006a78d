"""Tools of a request: which the model is offered, which it must call, and their messages in a history."""

from __future__ import annotations

from dataclasses import dataclass

from sagellm.core import nearest
from sagellm.core.protocols.parsers import FunctionTool
from sagellm.server.http.body_schema import ChatBody, Message
from sagellm.server.http.errors import invalid
from sagellm.server.http.tool_schema import NamedTool, Tool


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of a request, if the model may call any."""

    tools: tuple[Tool, ...]
    callable: tuple[FunctionTool, ...]  # those that it may call: one, if the request names it
    is_required: bool
    is_parallel: bool

    @property
    def is_strict(self) -> bool:
        """Whether a tool demands that its arguments match its schema."""
        return any(tool.is_strict for tool in self.callable)


def offer_of(body: ChatBody) -> Offer | None:
    """Return what a body offers, None if the model may call nothing. Raises APIError."""
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice: a call is demanded, and there are no tools; give some")
        return None
    names = [tool.function.name for tool in body.tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid("tools", f"tools[{index}].function.name: {name!r} is there twice; rename one")
    if body.tool_choice == "none":
        return None
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    if named is not None and named not in names:
        there = ", ".join(names[:16])
        told = f"tool_choice: there is no tool {named!r}; there is {there}.{nearest(named, names)}"
        raise invalid("tool_choice", told)
    functions = tuple(_function(tool) for tool in body.tools if named in (None, tool.function.name))
    return Offer(
        tuple(body.tools),
        functions,
        is_required=named is not None or body.tool_choice == "required",
        is_parallel=named is None and body.parallel_tool_calls is not False,
    )


def _function(tool: Tool) -> FunctionTool:
    return FunctionTool(
        name=tool.function.name,
        parameters=tool.function.parameters or {},
        is_strict=bool(tool.function.strict),
    )


def check_tool_message(message: Message, where: str, called: set[str]) -> None:
    """Check a message with calls, or with a result. `called` has the ids of calls so far. Raises APIError."""
    if message.tool_calls:
        if message.role != "assistant":
            raise invalid(f"{where}.tool_calls", f"{where}.tool_calls: only the assistant calls tools")
        called.update(call.id for call in message.tool_calls)
    if message.role != "tool":
        if message.tool_call_id is not None:
            raise invalid(
                f"{where}.tool_call_id", f"{where}.tool_call_id: only messages of the role 'tool' have one"
            )
    elif message.tool_call_id is None:
        raise invalid(
            f"{where}.tool_call_id", f"{where}.tool_call_id: it says which call this is the result of; add it"
        )
    elif message.tool_call_id not in called:
        raise invalid(
            f"{where}.tool_call_id",
            f"{where}.tool_call_id: no message of the assistant before it has a tool call with the id "
            f"{message.tool_call_id[:64]!r}; send that message too",
        )
