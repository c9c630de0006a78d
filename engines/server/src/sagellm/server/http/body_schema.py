"""What a body may contain: every field bounded. The ranges of sampling are those of SamplingParams.

`parsing` decodes one field at a time, and the long ones (prompts, messages, tokens) item by item.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sagellm.core import TokenIds
from sagellm.engines.requests.request_checks import MAX_DEADLINE_MS
from sagellm.engines.sampling.checks import Parameter
from sagellm.engines.sampling.params import MAX_LOGPROBS, MAX_N, PARAMETERS
from sagellm.server.http.tool_schema import CallId, ReasoningEffort, ToolCalls, ToolChoice, Tools

MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 256
MAX_LIST = 1024
MAX_TEMPLATE_NUMBER = 1_000_000
"""A template could repeat something that often."""
_EXACT = 2**53 - 1  # integers that any JSON reader represents exactly
_INT32 = 2**31 - 1

ModelName = Annotated[str, Meta(max_length=1024)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32)]
TokenIdList = Annotated[list[TokenId], Meta(max_length=MAX_LIST)]
ShortText = Annotated[str, Meta(min_length=1, max_length=MAX_LIST)]
ShortTexts = Annotated[list[ShortText], Meta(max_length=64)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Biases = Annotated[dict[Annotated[str, Meta(max_length=10)], Bias], Meta(max_length=MAX_LIST)]
Scalar = (
    bool | Annotated[int, Meta(ge=-_EXACT, le=_EXACT)] | float | Annotated[str, Meta(max_length=MAX_LIST)]
)
Identifier = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}\Z")]
ExtraArgs = Annotated[
    dict[Identifier, Scalar | Annotated[list[Scalar], Meta(max_length=MAX_LIST)] | None], Meta(max_length=32)
]
TemplateNumber = Annotated[int, Meta(ge=-MAX_TEMPLATE_NUMBER, le=MAX_TEMPLATE_NUMBER)]
TemplateOption = bool | TemplateNumber | float | Annotated[str, Meta(max_length=MAX_LIST)] | None
TemplateOptions = Annotated[dict[Identifier, TemplateOption], Meta(max_length=16)]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream has besides its chunks."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _field(name: str, each: Parameter) -> tuple[str, Any, None]:
    if each.type is bool:
        return name, bool | None, None
    high = each.body_high or each.high
    limits = Meta(ge=each.low, le=high) if each.includes_low else Meta(gt=each.low, le=high)
    return name, Annotated[each.type, limits] | None, None


if TYPE_CHECKING:

    class _Numbers(msgspec.Struct, kw_only=True):
        n: int | None = None  # this and the others are read by name

else:
    # The numbers and booleans of SamplingParams that mean the same in a body.
    _Numbers = msgspec.defstruct(
        "_Numbers",
        [
            _field(name, each)
            for name, each in PARAMETERS.items()
            if each.type in (int, float, bool) and name not in ("max_tokens", "logprobs", "prompt_logprobs")
        ],
        kw_only=True,
    )


class SamplingBody(_Numbers, kw_only=True):
    """The fields that both endpoints accept; None stands for an absent field."""

    model: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    stop: ShortText | ShortTexts | None = None
    stop_token_ids: TokenIdList | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: TokenIdList | None = None
    bad_words: ShortTexts | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-_INT32, le=_INT32)] | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=MAX_DEADLINE_MS)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    cache_namespace: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    extra_args: ExtraArgs | None = None
    vllm_xargs: ExtraArgs | None = None


class CompletionBody(SamplingBody, kw_only=True):
    """The body of POST /v1/completions. A prompt of token ids becomes a list of one."""

    prompt: str | list[str] | list[TokenIds]
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    logprobs: NumLogprobs | None = None


Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True):
    """One message of a chat."""

    role: Role
    content: str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)] | None = None
    name: Annotated[str, Meta(max_length=64)] | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of the same

    @property
    def num_characters(self) -> int:
        """Characters of all its texts."""
        num = len(self.text) + len(self.reasoning_content or self.reasoning or "")
        for call in self.tool_calls or ():
            num += len(call.function.name) + len(call.function.arguments)
        return num

    @property
    def text(self) -> str:
        """The content as one text; parts are joined by line ends, as vLLM does."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join([part.text for part in self.content])


class ChatBody(SamplingBody, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=_INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize: a prompt or messages."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The body of POST /detokenize."""

    model: ModelName | None = None
    tokens: TokenIds


Body = CompletionBody | ChatBody
