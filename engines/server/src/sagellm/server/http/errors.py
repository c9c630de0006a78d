"""Turns errors into responses that reveal no internals."""

from __future__ import annotations

import re
from math import ceil
from typing import Any

import msgspec

from sagellm.core import DeadlyRequestError, EngineDeadError, InvalidRequestError, get_logger

logger = get_logger(__name__)

RETRY_AFTER_S = 1
_MAX_MESSAGE = 400
_NAMED = re.compile(r"([a-z][a-z0-9_]*)(?: is | has |: )|.*; lower ([a-z_]+)")
_KIND = re.compile(r"^(?:json|json_object|regex|choice|grammar|structural_tag): ")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class APIError(Exception):
    """An error response. `message` is written for the caller and names no internals.

    A final one would be the answer to the same request again, so it tells clients not to retry.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        is_final: bool = False,
        retry_after_s: float = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = printable(message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}…")
        self.param = None if param is None else printable(param)
        self.code = code
        self.is_final = is_final
        self.retry_after_s = max(RETRY_AFTER_S, ceil(retry_after_s))

    @property
    def body(self) -> dict[str, Any]:
        """The answer as OpenAI's clients read it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def encoded(self) -> bytes:
        """The body as JSON."""
        return msgspec.json.encode(self.body)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of the answer besides its type and length."""
        if self.is_final:
            return [(b"x-should-retry", b"false")]  # as OpenAI's clients understand it
        if self.status in (429, 503):
            return [(b"retry-after", b"%d" % self.retry_after_s)]
        if self.status == 401:
            return [(b"www-authenticate", b"Bearer")]
        return [(b"connection", b"close")] if self.status in (408, 413) else []


def printable(text: str) -> str:
    """Return text that is safe for terminals and logs even if a caller wrote parts of it."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def unsupported(name: str, why: str = "", *, remedy: str = "leave it out") -> APIError:
    """Refuse a parameter that other servers support but this one does not."""
    reason = f": {why}" if why else ""
    message = f"the parameter {name!r} is not supported{reason}; {remedy}"
    return APIError(400, message, param=name, code="unsupported_parameter")


def invalid(name: str, message: str, *, code: str = "invalid_value") -> APIError:
    """Refuse a value."""
    return APIError(400, message, param=name, code=code)


class StructureRefusedError(InvalidRequestError):
    """The engine cannot compile what an answer must match."""


def structure_refused(error: StructureRefusedError, param: str) -> APIError:
    """Return the response for what a parameter wants answers to match; the engine has its own name for it."""
    return invalid(param, f"{param}: {_KIND.sub('', str(error))}")


def deadline_exceeded() -> APIError:
    """Return the answer to a request whose deadline has passed."""
    message = "the deadline of the request has passed; raise deadline_ms, or lower max_tokens"
    return APIError(504, message, param="deadline_ms", code="deadline_exceeded")


def as_api_error(error: BaseException) -> APIError:
    """Return the response for any error. Errors that the caller did not cause are logged and not described.

    The error loses its traceback, whose frames would keep the request's body, and what was generated for it,
    alive until the next garbage collection: one error may be that of many requests.
    """
    told = _told(error)
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return told


def _told(error: BaseException) -> APIError:
    if isinstance(error, APIError):
        return error
    if isinstance(error, InvalidRequestError):
        named = _NAMED.match(str(error))
        param = named[1] or named[2] if named else None
        return APIError(400, str(error), param=param, code="invalid_value")
    if isinstance(error, EngineDeadError):
        logger.debug("the engine is gone: %s", error)  # its end was logged once, for all requests
        return APIError(
            503,
            "the engine stopped, or is not running; send the request again",
            code="engine_dead",
            retry_after_s=error.retry_after_s or 0.0,
        )
    if isinstance(error, DeadlyRequestError):
        logger.warning("a request is refused: %s", error)
        return APIError(500, f"{error}; do not send it again", code="engine_died_twice", is_final=True)
    logger.error("a request ends with an error", exc_info=error)
    return APIError(500, "the request failed inside the server", code="internal_error")
