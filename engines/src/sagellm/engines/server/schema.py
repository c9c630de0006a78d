"""What a body may contain: every field bounded. The ranges of sampling are those of SamplingParams.

`parsing` decodes one field at a time, and the long ones (prompts, messages, tokens) item by item.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sagellm.core import TokenIds
from sagellm.engines.sampling.params import MAX_LOGPROBS, MAX_N

MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 256
MAX_LIST = 1024
MAX_TEMPLATE_NUMBER = 1_000_000
"""A template could repeat something that often."""
_EXACT = 2**53 - 1  # integers that a JSON reader keeps, whatever it is written in
_INT32 = 2**31 - 1
_INT64 = 2**63 - 1

ModelName = Annotated[str, Meta(max_length=1024)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32)]
TokenIdList = Annotated[list[TokenId], Meta(max_length=MAX_LIST)]
ShortText = Annotated[str, Meta(min_length=1, max_length=MAX_LIST)]
ShortTexts = Annotated[list[ShortText], Meta(max_length=64)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, le=_INT32)]
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
    """What a stream has beside its chunks."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(msgspec.Struct, kw_only=True):
    """What both endpoints take. None is what an absent field means."""

    model: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-_INT64 - 1, le=_INT64)] | None = None
    stop: ShortText | ShortTexts | None = None
    stop_token_ids: TokenIdList | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1000)] | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: TokenIdList | None = None
    bad_words: ShortTexts | None = None
    prompt_logprobs: NumLogprobs | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Meta(ge=-_INT32, le=_INT32)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    cache_namespace: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    extra_args: ExtraArgs | None = None
    vllm_xargs: ExtraArgs | None = None


class CompletionBody(SamplingBody, kw_only=True):
    """The body of POST /v1/completions. A prompt of token ids is a list of one."""

    prompt: str | list[str] | list[TokenIds]
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)] | None = None
    name: Annotated[str, Meta(max_length=64)] | None = None

    @property
    def text(self) -> str:
        """The content as one text; parts are joined by line ends, as vLLM does."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content)


class ChatBody(SamplingBody, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=_INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize: a prompt or messages."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The body of POST /detokenize."""

    model: ModelName | None = None
    tokens: TokenIds


Body = CompletionBody | ChatBody
