"""POST /v1/chat/completions: how its answers are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sagellm.engines.http.answer_ids import CHAT
from sagellm.engines.http.logprobs import chat_logprobs, prompt_logprobs
from sagellm.engines.http.reply import encode_json
from sagellm.engines.http.shape import Cursor, Shape, end_of, prompt_entries, raise_if_failed
from sagellm.engines.outputs import CompletionOutput, RequestOutput


class ChatShape(Shape):
    """The assistant's next message."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = CHAT

    def choice(self, index: int, output: CompletionOutput, request: RequestOutput) -> dict[str, Any]:
        """Return a finished continuation."""
        raise_if_failed(output)
        logprobs = None
        if output.logprobs is not None:
            logprobs = chat_logprobs(output.token_ids, output.logprobs, self.job.params.logprobs or 0)
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def extras(self, requests: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the prompt's log-probabilities, if requested."""
        if self.job.params.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(prompt_entries(requests[0]))}

    def render(self, cursor: Cursor, output: CompletionOutput) -> bytes:
        """Return an event with the new text, preceded the first time by one with the role."""
        text = output.text[cursor.num_characters :]
        token_ids = output.token_ids[cursor.num_tokens :] if output.logprobs is not None else ()
        if not text and not token_ids and output.finish_reason is None and cursor.has_started:
            return b""
        end = end_of(output)
        cursor.num_characters = len(output.text)
        logprobs = b"null"
        if output.logprobs is not None:
            new = output.logprobs[cursor.num_tokens :]
            logprobs = encode_json(chat_logprobs(token_ids, new, self.job.params.logprobs or 0))
            cursor.num_tokens += len(token_ids)
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
            if not text and not token_ids and output.finish_reason is None:
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
