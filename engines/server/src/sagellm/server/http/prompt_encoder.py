"""Turns prompts and messages into token ids, using a TextRunner, and checks their lengths."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sagellm.core import EngineError, InvalidRequestError, get_logger
from sagellm.engines.parsers.choice import PROMPT_END_TOKENS
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.text import ChatMessage, ChatTemplate
from sagellm.engines.text.calls import Decode, Encode, EncodeBadWords, Render, TextRunner
from sagellm.engines.text.errors import ForeignTextError, TextBusyError, TextLimitError
from sagellm.engines.text.limits import max_characters_of
from sagellm.engines.text.local import LONG_TEXT, LocalTextRunner
from sagellm.server.http.body_schema import ChatBody, CompletionBody, Message, TokenizeBody
from sagellm.server.http.errors import APIError, invalid, printable
from sagellm.server.http.reply import encode_json
from sagellm.server.http.tool_schema import Tool
from sagellm.server.http.tools import offer_of

if TYPE_CHECKING:
    from sagellm.engines.text.tokenizer import Tokenizer

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """The tokens of a prompt, and its text if the caller gave one."""

    token_ids: Sequence[int]
    text: str | None = None
    is_decoded: bool = False  # the text is that of the tokens, special ones included


class PromptEncoder:
    """Encodes the prompts and messages of bodies. Texts that cannot fit into the context are refused unread.

    `text_runner` runs template and tokenizer; without it they run in this process, without a time limit.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        *,
        text_runner: TextRunner | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_characters = max_characters_of(max_model_len)
        self._max_model_len = max_model_len
        self._text_runner = LocalTextRunner(tokenizer) if text_runner is None else text_runner
        self._template = ChatTemplate(tokenizer)

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._template.exists

    async def try_template(self) -> None:
        """Render a question, and log any failure: fixing a broken template is up to the operator.

        Done when the server starts, because callers only learn that their messages are refused.
        """
        if not self.has_template:
            return
        question = Render([ChatMessage("user", "Hello")], add_generation_prompt=True, options={})
        try:
            await self._text_runner.token_ids(question)
        except ForeignTextError as error:
            logger.warning(
                "a plain question fails, so chats may be refused (400); completions work: %s",
                printable(str(error)),
            )
        except EngineError as error:  # all workers are busy, or the server is ending
            logger.debug("the chat template was not tried: %s", error)

    async def encode_completion(self, body: CompletionBody) -> list[EncodedPrompt]:
        """Return the prompts of a completion: one for a text or ids, many for a list. Raises APIError."""
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if not prompts:
            raise invalid("prompt", "prompt: expected a text, texts, token ids, or lists of token ids")
        if ids := [prompt for prompt in prompts if not isinstance(prompt, str)]:  # they are all of one kind
            return [EncodedPrompt(token_ids=self._checked(each, "prompt")) for each in ids]
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        return [
            EncodedPrompt(token_ids=self._checked(token_ids, "prompt"), text=text)
            for token_ids, text in zip(await self._encode(texts), texts, strict=True)
        ]

    async def with_text(self, prompt: EncodedPrompt) -> EncodedPrompt:
        """Return a prompt with its text. Raises APIError."""
        if prompt.text is not None:
            return prompt
        text = await self._decode(list(prompt.token_ids), "prompt")
        return replace(prompt, text=text, is_decoded=True)

    async def with_tokens(self, params: SamplingParams) -> SamplingParams:
        """Return parameters with bad words as tokens instead of text. Raises APIError."""
        if not params.bad_words or self._tokenizer is None:  # without a tokenizer the engine refuses them
            return params
        with _errors_of("bad_words"):
            token_ids = await self._text_runner.token_ids(EncodeBadWords(list(params.bad_words)))
        ids = (*params.bad_words_token_ids, *map(tuple, token_ids))
        return replace(params, bad_words=(), bad_words_token_ids=ids)

    async def encode_chat(self, body: ChatBody) -> EncodedPrompt:
        """Return the prompt that the model's chat template makes of the messages. Raises APIError."""
        offer = offer_of(body)
        token_ids = await self._rendered(
            body.messages,
            self._effort(body.reasoning_effort) | (body.chat_template_kwargs or {}),
            add_generation_prompt=body.add_generation_prompt,
            tools=() if offer is None else offer.tools,
        )
        return EncodedPrompt(token_ids=self._checked(token_ids, "messages"))

    async def tokenize(self, body: TokenizeBody) -> list[int]:
        """Return the tokens of a text or of messages, even more than the context holds. Raises APIError."""
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "prompt: give either a prompt or messages")
        if body.messages is not None:
            if body.add_special_tokens:
                raise invalid(
                    "add_special_tokens",
                    "add_special_tokens: for messages, the chat template adds them; leave it out",
                )
            return await self._rendered(
                body.messages,
                body.chat_template_kwargs,
                add_generation_prompt=body.add_generation_prompt,
                tools=body.tools or (),
            )
        for name in ("add_generation_prompt", "chat_template_kwargs", "tools"):
            if getattr(body, name):
                raise invalid(name, f"{name}: only for messages; leave it out with a prompt")
        text, is_special = body.prompt or "", body.add_special_tokens is not False
        return (await self._encode([text], add_special_tokens=is_special))[0]

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, control tokens included. Raises APIError."""
        self._check_tokens(token_ids)
        return await self._decode(list(token_ids), "tokens")

    async def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary spells it, by table look-up."""
        tokenizer = self._tokenizer
        assert tokenizer is not None, "it made the ids"
        look_up = tokenizer.convert_ids_to_tokens
        if len(token_ids) > LONG_TEXT:
            return list(await asyncio.to_thread(look_up, list(token_ids)))
        return list(look_up(list(token_ids)))

    def unread(self, options: Mapping[str, Any]) -> list[str]:
        """Return the names of variables that the model's template does not read."""
        return [name for name in options if not self._template.reads(name)]

    def unread_of(self, body: ChatBody | TokenizeBody) -> Iterator[str]:
        """Yield the names of fields of a body that the model's template does not read."""
        reads_reasoning = self._template.reads("reasoning_content")
        if not reads_reasoning and any(each.reasoning_content for each in body.messages or ()):
            yield "messages.reasoning_content"
        if not reads_reasoning and any(each.reasoning for each in body.messages or ()):
            yield "messages.reasoning"
        if isinstance(body, ChatBody):
            effort = body.reasoning_effort
            if effort is not None and not self._effort(effort):
                yield "reasoning_effort"
            if body.tools and body.tool_choice == "none":
                yield "tools"

    async def end_of(self, prompt: EncodedPrompt) -> str:
        """Return the end of a prompt as text, control tokens included. Raises APIError."""
        return await self._decode(list(prompt.token_ids[-PROMPT_END_TOKENS:]), "messages")

    def _effort(self, effort: str | None) -> dict[str, Any]:
        """Return the variables by which the model's template is told how much to reason."""
        if effort is None:
            return {}
        if self._template.reads("reasoning_effort"):
            return {"reasoning_effort": effort}
        switch = next((name for name in ("enable_thinking", "thinking") if self._template.reads(name)), None)
        return {} if switch is None else {switch: effort != "none"}

    def _check_length(self, num_characters: int, param: str) -> None:
        if num_characters > self._max_characters:
            most = self._max_characters
            message = f"{param}: {num_characters} characters; there may be at most {most}; shorten it"
            raise invalid(param, message, code="context_length_exceeded")

    async def _encode(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        self._check_length(sum(map(len, texts)), "prompt")
        with _errors_of("prompt"):
            return await self._text_runner.token_ids(Encode(texts, add_special_tokens))

    async def _decode(self, token_ids: list[int], param: str) -> str:
        with _errors_of(param):
            return await self._text_runner.text(Decode(token_ids))

    def _checked(self, token_ids: Sequence[int], param: str) -> Sequence[int]:
        if not token_ids:
            raise invalid(
                param, f"{param}: it has no tokens, and the model needs at least one; write some text"
            )
        if len(token_ids) >= self._max_model_len:
            raise invalid(
                param,
                f"{param}: {len(token_ids)} tokens; there may be at most {self._max_model_len - 1}, so that "
                f"one of the model's {self._max_model_len} is left to generate; shorten it",
                code="context_length_exceeded",
            )
        return token_ids

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        if self._tokenizer is None:
            raise invalid("tokens", "tokens: the model has no tokenizer, so its tokens have no text")
        if len(token_ids) > self._max_characters:
            message = (
                f"tokens: {len(token_ids)} tokens; there may be at most {self._max_characters}; send fewer"
            )
            raise invalid("tokens", message, code="context_length_exceeded")
        largest, most = max(token_ids, default=0), len(self._tokenizer) - 1
        if largest > most:
            raise invalid("tokens", f"tokens: {largest} is not in the vocabulary; its tokens are 0 to {most}")

    async def _rendered(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any] | None,
        *,
        add_generation_prompt: bool | None,
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """Apply the model's template. Text that looks like a control token in a message stays text."""
        read = list(map(_as_chat_message, messages))
        offered = [tool.for_template for tool in tools]
        num_characters = sum(message.num_characters for message in read)
        self._check_length(num_characters, "messages")
        if tools:
            self._check_length(num_characters + len(encode_json(offered)), "tools")
            with _errors_of("tools"):
                self._template.check()
                self._template.check_tools()
        given = {name: value for name, value in (options or {}).items() if value is not None}
        with _errors_of("chat_template_kwargs"):
            self._template.check_options(given)
        used = {name: value for name, value in given.items() if self._template.reads(name)}
        with _errors_of("messages"):
            self._template.check()
            token_ids = await self._text_runner.token_ids(
                Render(read, add_generation_prompt is not False, used, offered)
            )
        return token_ids[0]


def _as_chat_message(message: Message) -> ChatMessage:
    return ChatMessage(
        message.role,
        message.text,
        message.name,
        tool_calls=[call.for_template for call in message.tool_calls] if message.tool_calls else (),
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning_content or message.reasoning,
    )


@contextmanager
def _errors_of(param: str) -> Iterator[None]:
    """Turn errors of template or tokenizer into an APIError for a parameter, and log their details."""
    try:
        yield
    except ForeignTextError as error:
        if error.detail:
            logger.error("%s", printable(str(error)))
        code = "encoding_limit" if isinstance(error, TextLimitError) else "invalid_value"
        raise invalid(param, f"{param}: {error.summary}", code=code) from error
    except InvalidRequestError as error:
        message = str(error)  # may begin with the parameter's name itself
        raise invalid(param, message if message.startswith(param) else f"{param}: {message}") from error
    except TextBusyError as error:
        raise APIError(503, str(error), code="encoding_busy") from None
