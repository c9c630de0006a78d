"""How many connections are open, and which of them has to go when there are too many."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from ipaddress import ip_address
from itertools import chain
from typing import Protocol

from sagellm.core import get_logger
from sagellm.engines.server.errors import APIError

logger = get_logger(__name__)

NUM_GUESTS = 16
"""Connections beyond the limits that are held at a time: probes are answered on them, all else is refused."""
_NUM_SPARE_FILES = 16
"""Descriptors that are left for anything but connections."""


class Connection(Protocol):
    """One connection, as those see it who count it."""

    peer: str | None

    def end(self) -> None:
        """Close it at once. `Connections.leave` is called when its descriptor is free."""


class Connections:
    """The open connections of a server.

    When there are as many as there may be, in all or from one address, the one that has been without a
    request for longest is closed for a new one. If all have one, the new one is a guest.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self.most = most
        self.most_of_one = most_of_one
        self.num_open = 0  # descriptors, also of those that are closing
        self._members: dict[Connection, None] = {}
        self._guests: dict[Connection, None] = {}
        self._silent: dict[Connection, None] = {}  # members without a request, longest first
        self._num_by_peer: Counter[str] = Counter()

    @property
    def has_room(self) -> bool:
        """Whether another descriptor may be opened."""
        return self.num_open < self.most + NUM_GUESTS

    def make_room(self) -> None:
        """End a guest or the member that has been silent for longest, unless something ends already."""
        if self.num_open <= len(self._members) + len(self._guests):
            one = next(chain(self._guests, self._silent), None)
            if one is not None:
                self._end(one)

    def enter(self, one: Connection) -> APIError | None:
        """Take in a connection. Return what a guest is told that is not a probe, None for a member."""
        limits = (
            (one.peer is not None and self._num_by_peer[one.peer] >= self.most_of_one, one.peer, 429),
            (len(self._members) >= self.most, None, 503),
        )
        for is_full, peer, status in limits:
            if not is_full:
                continue
            longest = next((each for each in self._silent if peer in (None, each.peer)), None)
            if longest is None:
                self._guests[one] = None
                return _refusal(status)
            self._end(longest)
        self._members[one] = self._silent[one] = None
        if one.peer is not None:
            self._num_by_peer[one.peer] += 1
        return None

    def begin(self, one: Connection) -> None:
        """Take note of a request."""
        self._silent.pop(one, None)

    def rest(self, one: Connection) -> None:
        """Take note that the last request is answered."""
        if one in self._members:
            self._silent[one] = None

    def leave(self, one: Connection) -> None:
        """Forget a connection. Idempotent."""
        self._guests.pop(one, None)
        self._silent.pop(one, None)
        if one in self._members:
            del self._members[one]
            if one.peer is not None:
                self._num_by_peer[one.peer] -= 1
                if not self._num_by_peer[one.peer]:
                    del self._num_by_peer[one.peer]

    def _end(self, one: Connection) -> None:
        self.leave(one)
        one.end()


def peer_of(address: str | None) -> str | None:
    """Return what counts as one peer: an IPv4 address, or the 64 bits of an IPv6 network."""
    with suppress(ValueError):
        ip = ip_address(address or "")
        if ip.version == 6:
            return str(ip_address(int(ip) >> 64 << 64)) if ip.ipv4_mapped is None else str(ip.ipv4_mapped)
    return address


def fit_to_files(most: int) -> int:
    """Return how many connections this process can hold of `most`.

    Its soft limit on open files is raised as far as they need and its hard limit allows.
    """
    try:
        import resource

        num_open = len(os.listdir("/proc/self/fd"))
    except (ImportError, OSError):  # not Linux
        return most
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = num_open + NUM_GUESTS + _NUM_SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < others + most:
        wanted = others + most if hard == resource.RLIM_INFINITY else min(hard, others + most)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY or soft >= others + most:
        return most
    fitting = max(1, soft - others)
    logger.warning(
        "server.max_connections is %d, and the limit of %d open files leaves room for %d; "
        "raise it with ulimit -n",
        most,
        soft,
        fitting,
    )
    return fitting


def _refusal(status: int) -> APIError:
    if status == 429:
        told = "there are too many connections from this address; close some, or try again later"
    else:
        told = "there are too many connections; try again later"
    return APIError(status, told, code="too_many_connections")
