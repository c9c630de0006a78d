"""What the latest requests asked for and what the prefix cache had of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sagellm.core import MissExplanation, Namespace, RequestId, TokenIds, UnknownRequestError

_MAX_REQUESTS = 1024
_MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """One request at its first admission."""

    request_id: RequestId
    namespace: Namespace
    token_ids: TokenIds
    admitted_ns: int
    explanation: MissExplanation


class RequestLog:
    """The last 1,024 requests, fewer where their prompts are longer than a million tokens together."""

    def __init__(self) -> None:
        self._requests: deque[LoggedRequest] = deque()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: LoggedRequest) -> None:
        """Note a request; the oldest go where there are too many."""
        requests = self._requests
        requests.append(request)
        self._num_tokens += len(request.token_ids)
        while len(requests) > _MAX_REQUESTS or (self._num_tokens > _MAX_TOKENS and len(requests) > 1):
            self._num_tokens -= len(requests.popleft().token_ids)

    def find(self, name: str | None) -> LoggedRequest:
        """Return a request by its id, as the API told it or as the engine has it; None is the latest.

        Raises UnknownRequestError.
        """
        if not self._requests:
            raise UnknownRequestError("no request has been admitted yet")
        if name is None:
            return self._requests[-1]
        plain = name.rpartition("cmpl-")[2]
        for request in reversed(self._requests):
            if request.request_id in (name, plain, f"{plain}-0"):
                return request
        raise UnknownRequestError(
            f"no request {name!r} among the last {len(self)}; the latest is {self._requests[-1].request_id!r}"
        )
