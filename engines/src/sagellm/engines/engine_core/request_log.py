"""What the latest requests asked for and how much of it the prefix cache had."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence as Seq
from typing import NamedTuple

from sagellm.core import InvalidInputError, Namespace, RequestId, TokenIds, UnknownRequestError
from sagellm.core.protocols.prefix_cache import MissExplanation
from sagellm.engines.config.shown import shown
from sagellm.engines.engine_core.sequence import Sequence

_MAX_REQUESTS = 1024
_MAX_TOKENS = 1 << 20
_MIN_CHARACTERS, _MAX_LISTED = 4, 10


class LoggedRequest(NamedTuple):
    """One request at its first admission."""

    request_id: RequestId
    namespace: Namespace
    token_ids: TokenIds
    admitted_ns: int
    explain: Callable[[], MissExplanation]  # why no more of it matched
    is_scored: bool = False  # its prompt's log-probabilities are wanted, so nothing was looked up


class RequestLog:
    """The last 1,024 requests, or fewer if their prompts exceed a million tokens in total."""

    def __init__(self) -> None:
        self._requests: deque[LoggedRequest] = deque()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, sequence: Sequence, explain: Callable[[], MissExplanation], admitted_ns: int) -> None:
        """Record what an admitted sequence asked for; the oldest are dropped when there are too many."""
        requests, request = self._requests, sequence.request
        requests.append(
            LoggedRequest(
                request.request_id,
                request.namespace,
                request.token_ids,
                admitted_ns,
                explain,
                is_scored=sequence.num_to_score > 0,
            )
        )
        self._num_tokens += len(request.token_ids)
        while len(requests) > _MAX_REQUESTS or (self._num_tokens > _MAX_TOKENS and len(requests) > 1):
            self._num_tokens -= len(requests.popleft().token_ids)

    def find(self, name: str | None) -> LoggedRequest:
        """Return a request by its id or a unique prefix of it; None means the latest.

        Raises UnknownRequestError, or InvalidInputError for a name that is not a string.
        """
        latest = {str(request.request_id): request for request in self._requests}
        ids = [str(request.request_id) for request in self._requests]
        return latest[find_id(name, ids, if_empty="no request has been admitted yet")]


def find_id(name: str | None, ids: Seq[str], *, if_empty: str) -> str:
    """Return the id that equals a name, or the only one that begins with it; None means the last id.

    Raises UnknownRequestError, with the message `if_empty` if there are no ids, and InvalidInputError for a
    name that is not a string.
    """
    if name is not None and not isinstance(name, str):  # operators' calls are not typed
        raise InvalidInputError(f"the request is {shown(name)}; it must be a text: its id, or its beginning")
    if not ids:
        raise UnknownRequestError(if_empty)
    if name is None:
        return ids[-1]
    found = [name] if name in ids else []
    if not found and len(name) >= _MIN_CHARACTERS:
        found = [each for each in dict.fromkeys(ids) if each.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(map(repr, found[:_MAX_LISTED])) + (", …" if len(found) > _MAX_LISTED else "")
        raise UnknownRequestError(f"{shown(name)} begins {len(found)} ids: {listed}; give more of it")
    raise UnknownRequestError(
        f"no request {shown(name)} among the last {len(ids)}; the latest is {ids[-1]!r}: give one of them, "
        f"or at least {_MIN_CHARACTERS} characters that it begins with"
    )
