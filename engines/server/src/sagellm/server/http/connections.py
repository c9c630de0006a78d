"""Limits the open connections, and chooses which one to close for a new one."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from ipaddress import ip_address
from itertools import chain
from typing import Protocol

from sagellm.core import get_logger
from sagellm.server.http.errors import APIError

logger = get_logger(__name__)

NUM_PROBE_ONLY = 16
"""Connections above the limits that are kept open at a time; only probes are answered on them."""
_NUM_SPARE_FILES = 16  # descriptors for anything but connections

_REFUSALS = {
    429: "there are too many connections from this address; close some, or try again later",
    503: "there are too many connections; try again later",
}


class Connection(Protocol):
    """A connection, as Connections sees it."""

    peer: str | None

    def abort(self) -> None:
        """Close it at once. It calls `Connections.remove` when its descriptor is free."""


class Connections:
    """The open connections of a server, limited in all and per peer.

    At a limit, the connection that has been idle (without a request) for longest is closed to admit a new
    one. If none is idle, the new one is kept for probes only.
    """

    def __init__(self, max_open: int, max_per_peer: int) -> None:
        self.max_open = max_open
        self.max_per_peer = max_per_peer
        self.num_open = 0  # descriptors, including those of closing connections
        self._members: dict[Connection, None] = {}
        self._probe_only: dict[Connection, None] = {}
        self._idle: dict[Connection, None] = {}  # members without a request, longest first
        self._num_by_peer: Counter[str] = Counter()

    @property
    def has_room(self) -> bool:
        """Whether another descriptor may be opened."""
        return self.num_open < self.max_open + NUM_PROBE_ONLY

    def make_room(self) -> None:
        """Abort a probe-only connection or the longest idle member, unless one is closing already."""
        if self.num_open <= len(self._members) + len(self._probe_only):
            connection = next(chain(self._probe_only, self._idle), None)
            if connection is not None:
                self._abort(connection)

    def add(self, connection: Connection) -> APIError | None:
        """Admit a connection; return None, or the answer to all but probes if it is probe-only."""
        limits = (
            (self._num_by_peer[connection.peer or ""] >= self.max_per_peer, connection.peer, 429),
            (len(self._members) >= self.max_open, None, 503),
        )
        for is_full, peer, status in limits:
            if not is_full:
                continue
            longest = next((each for each in self._idle if peer in (None, each.peer)), None)
            if longest is None:
                self._probe_only[connection] = None
                return APIError(status, _REFUSALS[status], code="too_many_connections")
            self._abort(longest)
        self._members[connection] = self._idle[connection] = None
        if connection.peer is not None:
            self._num_by_peer[connection.peer] += 1
        return None

    def mark_busy(self, connection: Connection) -> None:
        """Record that a request has begun."""
        self._idle.pop(connection, None)

    def mark_idle(self, connection: Connection) -> None:
        """Record that the last request has been answered."""
        if connection in self._members:
            self._idle[connection] = None

    def remove(self, connection: Connection) -> None:
        """Forget a connection. Idempotent."""
        self._probe_only.pop(connection, None)
        self._idle.pop(connection, None)
        if connection in self._members:
            del self._members[connection]
            if connection.peer is not None:
                self._num_by_peer[connection.peer] -= 1
                if not self._num_by_peer[connection.peer]:
                    del self._num_by_peer[connection.peer]

    def _abort(self, connection: Connection) -> None:
        self.remove(connection)
        connection.abort()


def peer_of(address: str | None) -> str | None:
    """Return what counts as one peer: an IPv4 address or an IPv6 /64 network."""
    with suppress(ValueError):
        ip = ip_address(address or "")
        if ip.version == 6:
            return str(ip_address(int(ip) >> 64 << 64)) if ip.ipv4_mapped is None else str(ip.ipv4_mapped)
    return address


def fit_to_files(wanted: int) -> int:
    """Return how many of the wanted connections the limit on open files allows.

    The soft limit is raised as needed, up to the hard limit.
    """
    try:
        import resource

        num_open = len(os.listdir("/proc/self/fd"))
    except (ImportError, OSError):  # not Linux
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = num_open + NUM_PROBE_ONLY + _NUM_SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < others + wanted:
        target = others + wanted if hard == resource.RLIM_INFINITY else min(hard, others + wanted)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY or soft >= others + wanted:
        return wanted
    fitting = max(1, soft - others)
    logger.warning(
        "server.max_connections is %d, but the limit of %d open files leaves room for %d; "
        "raise it with ulimit -n",
        wanted,
        soft,
        fitting,
    )
    return fitting
