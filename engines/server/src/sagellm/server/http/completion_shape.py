"""POST /v1/completions: how its answers are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from sagellm.engines.requests.outputs import CompletionOutput, RequestOutput
from sagellm.server.http.answer_ids import COMPLETION
from sagellm.server.http.logprobs import (
    TokenAt,
    completion_logprobs,
    prompt_logprobs,
    with_offsets,
    with_prompt_offsets,
)
from sagellm.server.http.prompt_encoder import EncodedPrompt
from sagellm.server.http.reply import encode_json
from sagellm.server.http.shape import Cursor, Shape, end_of, hidden_states, raise_if_failed

_HIDDEN_END = b',"finish_reason":"length","stop_reason":null}]'


class CompletionShape(Shape):
    """Text completions, preceded by the prompt if the caller wants an echo."""

    object_name = chunk_name = "text_completion"
    id_prefix = COMPLETION

    def choice(self, index: int, output: CompletionOutput, request: RequestOutput) -> Iterator[bytes]:
        """Yield a finished continuation."""
        job = self.job
        echoed = self._prompt(index).text or "" if job.echoes else ""
        text = echoed if job.hides_output else echoed + output.text
        yield b'{"index":%d,"text":%b,"logprobs":' % (index, encode_json(text))
        if output.logprobs is None or job.hides_logprobs:
            yield b"null"
        else:
            yield from self._logprobs(index, output, request)
        yield (_HIDDEN_END if job.hides_output else end_of(output)).removesuffix(b"}]")
        if job.returns_token_ids:
            token_ids = [] if job.hides_output else output.token_ids
            yield b',"prompt_token_ids":' + encode_json(request.prompt_token_ids)
            yield b',"token_ids":' + encode_json(token_ids)
        if not job.hides_output:
            yield from hidden_states(output)
        if job.params.prompt_logprobs is not None and request.prompt_logprobs is not None:
            yield b',"prompt_logprobs":'
            yield from prompt_logprobs(request.prompt_logprobs.positions())
        yield b"}"

    def render(self, cursor: Cursor, output: CompletionOutput) -> bytes:
        """Return an event with the new text."""
        if self.job.hides_output and output.finish_reason is None:
            return b""
        text = "" if self.job.hides_output else output.text[cursor.num_characters :]
        shows_ids = self.job.returns_token_ids and not self.job.hides_output
        token_ids = output.token_ids[cursor.num_tokens :] if shows_ids else ()
        num_scored = 0 if output.logprobs is None or self.job.hides_output else len(output.logprobs)
        is_scored = num_scored > cursor.num_scored
        if not text and not token_ids and not is_scored and output.finish_reason is None:
            return b""
        raise_if_failed(output)
        end = _HIDDEN_END if self.job.hides_output else end_of(output)
        cursor.num_characters = len(output.text)
        logprobs = self._new_logprobs(cursor, output)
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

    def _new_logprobs(self, cursor: Cursor, output: CompletionOutput) -> bytes:
        """Return the log-probabilities of tokens whose text has become known."""
        if output.logprobs is None or self.job.hides_output:
            return b"null"
        new = list(with_offsets(output.logprobs.positions(cursor.num_scored), cursor.offset))
        if new:
            last, offset = new[-1]
            cursor.offset = offset + last.texts[0].num_characters
            cursor.num_scored += len(new)
        return b"".join(self._written(new))

    def _logprobs(self, index: int, output: CompletionOutput, request: RequestOutput) -> Iterator[bytes]:
        """Return the log-probabilities of a finished continuation, after those of an echoed prompt."""
        assert output.logprobs is not None, "they were requested"
        own = iter(()) if self.job.hides_output else output.logprobs.positions()
        if not self.job.echoes or request.prompt_logprobs is None:
            return self._written(with_offsets(own))
        prompt = self._prompt(index)
        text = prompt.text or ""
        # The text of a prompt of token ids has its special tokens.
        echoed = request.prompt_logprobs.positions(skip_special_tokens=not prompt.is_decoded)
        return self._written(chain(with_prompt_offsets(echoed, text), with_offsets(own, len(text))))

    def _written(self, tokens: Iterable[TokenAt | None]) -> Iterator[bytes]:
        num_top, as_ids = self.job.params.logprobs or 0, self.job.shows_tokens_as_ids
        return completion_logprobs(tokens, num_top, as_ids=as_ids)

    def _prompt(self, index: int) -> EncodedPrompt:
        return self.job.prompts[index // self.job.num_choices]
