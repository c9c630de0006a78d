"""From messages to token ids, through the chat template of the tokenizer."""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sagellm.core import InvalidRequestError
from sagellm.engines.text.chat_messages import ChatMessage
from sagellm.engines.text.chat_tools import calls_for_template, read_tools, with_texts
from sagellm.engines.text.control_tokens import ControlTokens
from sagellm.engines.text.errors import ChatTemplateError as ChatTemplateError, TextLimitError
from sagellm.engines.text.guarded_tokenizer import encode
from sagellm.engines.text.placeholders import Placeholders
from sagellm.engines.text.tokenizer import TEMPLATE_ARGUMENTS

if TYPE_CHECKING:
    from sagellm.engines.text.tokenizer import Tokenizer

_WORD = re.compile(r"\w+")
_RESERVED = TEMPLATE_ARGUMENTS | frozenset(
    {"dict", "loop", "messages", "namespace", "raise_exception", "range", "strftime_now", "template"}
)
"""Names that are passed to templates or to their renderer, or exist in every template's environment."""
_MAX_TOLD = 200  # characters of a template's message


class ChatTemplate:
    """Renders conversations as the model was trained to read them.

    Text in a message that looks like a control token stays text. An answer whose token ids are known gets
    exactly these, so that its KV is found again, unless the template edits it (some leave out the model's
    reasoning): then the template's text is used.

    A template is a program that comes with the checkpoint. It runs in the calling thread without a time
    limit; servers use a `ProcessTextRunner` instead. `max_characters` bounds its output.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, max_characters: int | None = None) -> None:
        self._tokenizer = tokenizer
        self.max_characters = max_characters

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that the template belongs to."""
        return self._tokenizer

    @property
    def exists(self) -> bool:
        """Whether the model has a template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def check(self) -> None:
        """Raise InvalidRequestError if there is no template."""
        if self._tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer; chatting needs one with a chat template")
        if not self.exists:
            raise InvalidRequestError(
                "the model's tokenizer has no chat template, so it is not a chat model; give it plain prompts"
            )

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise InvalidRequestError for a name that only the server may set."""
        taken = {*_RESERVED, *getattr(self._tokenizer, "special_tokens_map", ())}
        for name in options:
            if not isinstance(name, str) or name in taken:
                raise InvalidRequestError(f"a request cannot set {name!r} of the chat template; leave it out")

    def check_tools(self) -> None:
        """Raise InvalidRequestError if the template has no place for tools."""
        if not self.reads("tools"):
            raise InvalidRequestError(
                "the model's chat template has no place for tools, so the model would not see them; leave "
                "tools out, or use a model that calls functions"
            )

    @property
    def source(self) -> str:
        """The template's source, that for tools if there are several; empty without a template."""
        source = getattr(self._tokenizer, "chat_template", None) or ""
        if isinstance(source, Mapping):
            return str(source.get("tool_use") or source.get("default") or "")
        return str(source)

    def prepare(self) -> None:
        """Build what all conversations share, without running the template."""
        if self._tokenizer is not None:
            self._control.prepare()
        if self.exists:
            import_module("sagellm.engines.text.jinja_templates")

    def reads(self, name: str) -> bool:
        """Say whether the template may read a variable: whether its name occurs as a word in the template."""
        return name in self._words

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the token ids of a conversation; `options` are variables of the template.

        With `add_generation_prompt`, the assistant's turn is opened. `tools` have OpenAI's form. Control
        tokens in options and tools stay text, too. Raises ChatTemplateError with the template's error and its
        line, TextLimitError if the output is too long, TokenizerError, InvalidRequestError for tools
        where the template has no place for them.
        """
        self.check()
        self.check_options(options or {})
        placeholders = Placeholders()
        call = {"add_generation_prompt": add_generation_prompt} | {
            name: self._control.hide(value, placeholders) if isinstance(value, str) else value
            for name, value in (options or {}).items()
        }
        if tools:
            self.check_tools()
            hide = partial(self._control.hide, placeholders=placeholders)
            call["tools"] = [with_texts(tool, hide) for tool in read_tools(tools)]
        exact = {index for index, message in enumerate(messages) if message.token_ids}
        if exact:
            exact = self._unedited(messages, exact, placeholders, call)
        text = self._apply(self._as_read(messages, exact, placeholders), call)
        return placeholders.encode(text, self._encode)

    def _unedited(
        self,
        messages: Sequence[ChatMessage],
        answers: set[int],
        placeholders: Placeholders,
        call: Mapping[str, Any],
    ) -> set[int]:
        """Return which answers the template includes unchanged, apart from surrounding whitespace."""
        expected = self._apply(self._as_read(messages, (), placeholders), call)

        def is_unedited(some: Collection[int]) -> bool:
            rendered = self._apply(self._as_read(messages, some, placeholders), call)
            contents = {index: self._control.hide(messages[index].content, placeholders) for index in some}
            marks = {index: placeholders.mark(index, messages[index].token_ids) for index in some}
            whole = stripped = rendered
            for index in some:
                whole = whole.replace(marks[index], contents[index])
                stripped = stripped.replace(marks[index], contents[index].strip())
            return expected in (whole, stripped)

        return answers if is_unedited(answers) else {index for index in answers if is_unedited((index,))}

    def _as_read(
        self, messages: Sequence[ChatMessage], exact: Collection[int], placeholders: Placeholders
    ) -> list[dict[str, Any]]:
        """Write messages as templates expect them, with marks for control tokens and exact answers."""
        read: list[dict[str, Any]] = []
        for index, message in enumerate(messages):
            if index in exact:
                content = placeholders.mark(index, message.token_ids)
            else:
                content = self._control.hide(message.content, placeholders)
            entry = {"role": self._control.hide(message.role, placeholders), "content": content}
            if message.name is not None:
                entry["name"] = self._control.hide(message.name, placeholders)
            if message.tool_calls or message.tool_call_id is not None or message.reasoning is not None:
                extra = self._extra(message, f"messages[{index}]")
                entry |= with_texts(extra, partial(self._control.hide, placeholders=placeholders))
            read.append(entry)
        return read

    def _extra(self, message: ChatMessage, where: str) -> dict[str, Any]:
        """Return what a message has of calls and reasoning."""
        extra: dict[str, Any] = {}
        if message.tool_calls:
            reads_text = "arguments is string" in self.source
            extra["tool_calls"] = calls_for_template(message.tool_calls, where, reads_text=reads_text)
        if message.tool_call_id is not None:
            extra["tool_call_id"] = message.tool_call_id
        if message.reasoning is not None and self.reads("reasoning_content"):
            extra["reasoning_content"] = message.reasoning
        return extra

    @cached_property
    def _words(self) -> frozenset[str]:
        source = getattr(self._tokenizer, "chat_template", None) or ""
        sources = [source] if isinstance(source, str) else list(source.values())
        return frozenset(word for one in sources for word in _WORD.findall(one))

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self._tokenizer)

    def _apply(self, messages: list[dict[str, Any]], call: Mapping[str, Any]) -> str:
        assert self._tokenizer is not None, "checked"
        try:
            text = str(self._tokenizer.apply_chat_template(messages, tokenize=False, **call))
        except MemoryError:
            raise TextLimitError("the model's chat template needs more memory than it may use") from None
        except Exception as error:  # from the template, which may refuse roles or their order
            raise _template_error(error) from None
        if self.max_characters is not None and len(text) > self.max_characters:
            raise TextLimitError(
                f"the model's chat template makes {len(text)} characters of these messages; there may be at "
                f"most {self.max_characters}"
            )
        return text

    def _encode(self, text: str) -> Sequence[int]:
        assert self._tokenizer is not None, "checked"
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the messages are not valid Unicode text: {error}") from error
        return encode(self._tokenizer, text, add_special_tokens=False)


def _template_error(error: Exception) -> ChatTemplateError:
    """Return the error that a template raised with raise_exception, or why and in which line it failed."""
    from jinja2 import TemplateError

    told = str(error)[:_MAX_TOLD]
    if type(error) is TemplateError and told:
        return ChatTemplateError(f"the model's chat template refuses these messages: {told}")
    line = _line_of(error)
    where = f" (line {line} of the template)" if line else ""
    return ChatTemplateError(
        "the model's chat template cannot render these messages", f"{type(error).__name__}: {told}{where}"
    )


def _line_of(error: Exception) -> int | None:
    """Return the line of the template that failed; Jinja puts it into syntax errors and tracebacks."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename in ("<template>", "<unknown>")]
    return getattr(error, "lineno", None) or next(reversed(lines), None)
