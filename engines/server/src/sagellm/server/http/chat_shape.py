"""POST /v1/chat/completions: how its answers are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sagellm.engines.requests.outputs import CompletionOutput, RequestOutput
from sagellm.server.http.answer_ids import CHAT
from sagellm.server.http.logprobs import chat_logprobs, prompt_logprobs
from sagellm.server.http.reply import encode_json
from sagellm.server.http.shape import Cursor, Shape, end_of, hidden_states


class ChatShape(Shape):
    """The assistant's next message."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = CHAT

    def choice(self, index: int, output: CompletionOutput, request: RequestOutput) -> Iterator[bytes]:
        """Yield a finished continuation."""
        message = {"role": "assistant", "content": output.text, "refusal": None}
        yield b'{"index":%d,"message":%b,"logprobs":' % (index, encode_json(message))
        yield from self._logprobs(output, 0)
        yield end_of(output).removesuffix(b"}]")
        yield from hidden_states(output)
        yield b"}"

    def extras(self, requests: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Yield the prompt's log-probabilities, if requested."""
        if (scored := requests[0].prompt_logprobs) is not None:
            yield b',"prompt_logprobs":'
            yield from prompt_logprobs(scored.positions())

    def _logprobs(self, output: CompletionOutput, start: int) -> Iterator[bytes]:
        """Yield the log-probabilities of the tokens from one on."""
        if output.logprobs is None:
            return iter((b"null",))
        num_top, as_ids = self.job.params.logprobs or 0, self.job.shows_tokens_as_ids
        return chat_logprobs(output.logprobs.positions(start), num_top, as_ids=as_ids)

    def render(self, cursor: Cursor, output: CompletionOutput) -> bytes:
        """Return an event with the new text, preceded the first time by one with the role."""
        text = output.text[cursor.num_characters :]
        num_scored = 0 if output.logprobs is None else len(output.logprobs)
        is_empty = not text and num_scored == cursor.num_scored and output.finish_reason is None
        if is_empty and cursor.has_started:
            return b""
        end = end_of(output)
        cursor.num_characters = len(output.text)
        logprobs = b"".join(self._logprobs(output, cursor.num_scored))
        cursor.num_scored = num_scored
        first = b""
        if not cursor.has_started:
            cursor.has_started = True
            first = b"".join(
                (
                    cursor.prefix,
                    b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]',
                    self.tail(cursor, 0),
                )
            )
            if is_empty:
                return first
        return b"".join(
            (
                first,
                cursor.prefix,
                b'"delta":{"content":',
                encode_json(text),
                b'},"logprobs":',
                logprobs,
                end,
                self.tail(cursor, len(output.token_ids)),
            )
        )
