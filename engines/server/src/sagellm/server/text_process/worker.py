"""A worker: a forked process that answers calls one after another, within limits."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from sagellm.core import InvalidRequestError
from sagellm.engines.text.calls import Call
from sagellm.engines.text.chat_template import ChatTemplate
from sagellm.engines.text.errors import ChatTemplateError, TextLimitError, TokenizerError
from sagellm.engines.text.guarded_tokenizer import is_foreign
from sagellm.engines.text.limits import TextLimits
from sagellm.server.remote.frames import FrameReader, encode
from sagellm.server.text_process.messages import Answer, Failure, ToWorker

_MAX_GROWTH_KIB = 256 << 10  # of resident memory, after which a worker ends
_CPU_GRACE_S = 2


def work(connection: socket.socket, template: ChatTemplate) -> None:
    """Answer calls until the front closes the connection; its first message is TextLimits."""
    start_kib = _peak_kib()
    limits: TextLimits | None = None
    for message in _messages(connection):
        if isinstance(message, TextLimits):
            limits = message
            _limit_memory(limits.memory_bytes)
            template.max_characters = limits.max_rendered
            connection.sendall(encode(Answer()))
            continue
        assert limits is not None, "the front sends limits first"
        _limit_cpu(limits.timeout_s)
        answer = _answer(message, template, limits)
        has_grown = _peak_kib() - start_kib > _MAX_GROWTH_KIB
        connection.sendall(encode(replace(answer, is_last=True) if has_grown else answer))
        if has_grown:
            return


def _messages(connection: socket.socket) -> Iterator[ToWorker]:
    reader = FrameReader(ToWorker)
    while data := connection.recv(1 << 16):
        yield from reader.feed(data)


def _answer(call: Call, template: ChatTemplate, limits: TextLimits) -> Answer:
    try:
        result = call.run(template)
    except BaseException as error:
        if not is_foreign(error):
            raise
        return Answer(failure=_failure(error))
    if isinstance(result, str):
        return Answer(text=result)
    num_tokens, most = sum(map(len, result)), limits.max_tokens
    if num_tokens > most:
        summary = f"the model's tokenizer makes {num_tokens} tokens of this; there may be at most {most}"
        return Answer(failure=Failure("limit", summary))
    return Answer(token_ids=result)


def _failure(error: BaseException) -> Failure:
    match error:
        case ChatTemplateError():
            return Failure("template", error.summary, error.detail)
        case TextLimitError():
            return Failure("limit", error.summary, error.detail)
        case TokenizerError():
            if isinstance(error.__cause__, MemoryError):
                return Failure("limit", "the model's tokenizer needs more memory than it may use")
            return Failure("tokenizer", error.summary, error.detail)
        case InvalidRequestError():
            return Failure("request", str(error))
    return Failure("internal", f"{type(error).__name__}: {error}")


def _limit_memory(num_bytes: int) -> None:
    """Limit the growth of this process's address space; larger allocations fail."""
    with suppress(OSError, ValueError):  # no /proc, or a lower limit exists
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _limit_cpu(seconds: float) -> None:
    """Have the kernel kill this process after that much more CPU time, in case the front cannot."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime + seconds) + _CPU_GRACE_S
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
