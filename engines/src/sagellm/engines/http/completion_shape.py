"""POST /v1/completions: how its answers are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sagellm.engines.http.answer_ids import COMPLETION
from sagellm.engines.http.logprobs import completion_logprobs, prompt_logprobs
from sagellm.engines.http.reply import encode_json
from sagellm.engines.http.shape import Cursor, Shape, end_of, prompt_entries, raise_if_failed
from sagellm.engines.outputs import CompletionOutput, RequestOutput

_HIDDEN_END = b',"finish_reason":"length","stop_reason":null}]'


class CompletionShape(Shape):
    """Text completions, preceded by the prompt if the caller wants an echo."""

    object_name = chunk_name = "text_completion"
    id_prefix = COMPLETION

    def choice(self, index: int, output: CompletionOutput, request: RequestOutput) -> dict[str, Any]:
        """Return a finished continuation."""
        raise_if_failed(output)
        job = self.job
        prompt = job.prompts[index // job.num_choices]
        echoed = (prompt.text or "") if job.echoes else ""
        written = {
            "index": index,
            "text": echoed if job.hides_output else echoed + output.text,
            "logprobs": self._logprobs(output, request),
            "finish_reason": "length" if job.hides_output else output.finish_reason,
            "stop_reason": None if job.hides_output else output.stop_reason,
        }
        if job.returns_token_ids:
            written["prompt_token_ids"] = list(request.prompt_token_ids)
            written["token_ids"] = [] if job.hides_output else list(output.token_ids)
        if job.params.prompt_logprobs is not None:
            written["prompt_logprobs"] = prompt_logprobs(prompt_entries(request))
        return written

    def render(self, cursor: Cursor, output: CompletionOutput) -> bytes:
        """Return an event with the new text."""
        if self.job.hides_output and output.finish_reason is None:
            return b""
        text = "" if self.job.hides_output else output.text[cursor.num_characters :]
        shows_logprobs = output.logprobs is not None and not self.job.hides_output
        shows_ids = self.job.returns_token_ids and not self.job.hides_output
        token_ids = output.token_ids[cursor.num_tokens :] if shows_logprobs or shows_ids else ()
        if not text and not token_ids and output.finish_reason is None:
            return b""
        raise_if_failed(output)
        end = _HIDDEN_END if self.job.hides_output else end_of(output)
        cursor.num_characters = len(output.text)
        logprobs = b"null"
        if shows_logprobs:
            logprobs = self._streamed_logprobs(cursor, output, token_ids)
        if self.job.returns_token_ids:
            logprobs += self._token_ids(cursor, token_ids)
        cursor.num_tokens += len(token_ids)
        if not cursor.has_started:
            cursor.has_started = True
            text = ((cursor.prompt.text or "") if self.job.echoes else "") + text
        tail = self.tail(cursor, len(output.token_ids))
        return b"".join((cursor.prefix, b'"text":', encode_json(text), b',"logprobs":', logprobs, end, tail))

    def _token_ids(self, cursor: Cursor, token_ids: Sequence[int]) -> bytes:
        """Return the new tokens as members of a choice, in its first chunk with those of the prompt."""
        new = b',"token_ids":' + encode_json(list(token_ids))
        if cursor.has_started:
            return new
        return new + b',"prompt_token_ids":' + encode_json(list(cursor.prompt.token_ids))

    def _streamed_logprobs(self, cursor: Cursor, output: CompletionOutput, token_ids: Sequence[int]) -> bytes:
        assert output.logprobs is not None
        num_top = self.job.params.logprobs or 0
        new = output.logprobs[cursor.num_tokens :]
        written = completion_logprobs(token_ids, new, num_top, offset=cursor.offset)
        cursor.offset += sum(map(len, written["tokens"]))
        return encode_json(written)

    def _logprobs(self, output: CompletionOutput, request: RequestOutput) -> dict[str, Any] | None:
        if output.logprobs is None or self.job.hides_logprobs:
            return None
        token_ids: list[int] = [] if self.job.hides_output else list(output.token_ids)
        entries: list[Any] = [] if self.job.hides_output else list(output.logprobs)
        num_top = self.job.params.logprobs or 0
        if not self.job.echoes:
            return completion_logprobs(token_ids, entries, num_top)
        token_ids = list(request.prompt_token_ids) + token_ids
        entries = [*prompt_entries(request), *entries]
        return completion_logprobs(token_ids, entries, num_top, text_of=self.job.text_of)
