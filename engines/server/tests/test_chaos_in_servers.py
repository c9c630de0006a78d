"""Faults on demand that only a server has: data in pieces, an early selector, processes with other seeds."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys

from sagellm.core.chaos import VARIABLE, Chaos
from sagellm.server.chaos import child_environment, flaky_selector, in_pieces, notice


def wild() -> Chaos:
    """Return chaos under whose seed the point `a` is wild."""
    return Chaos("1")


def test_without_the_variable_a_mark_returns_what_it_was_given():
    assert in_pieces("c", lambda _: False)(print) is print
    with selectors.DefaultSelector() as selector:
        assert flaky_selector("e", selector) is selector
    assert (notice(), child_environment()) == ("", None)


def test_received_data_is_delivered_in_pieces_until_the_transport_is_closed():
    class Protocol:
        closes_at = 1 << 30

        def __init__(self) -> None:
            self.pieces: list[bytes] = []

        @in_pieces("a", lambda self: sum(map(len, self.pieces)) >= self.closes_at, chaos=wild())
        def data_received(self, data: bytes) -> None:
            self.pieces.append(data)

    protocol = Protocol()
    protocol.data_received(bytes(range(256)) * 20)
    assert b"".join(protocol.pieces) == bytes(range(256)) * 20
    assert len(protocol.pieces) > 2
    protocol.pieces, protocol.closes_at = [], 1
    protocol.data_received(bytes(1000))
    assert len(protocol.pieces) == 1


def test_a_selector_loses_no_event():
    chaos = wild()
    ours, theirs = socket.socketpair()
    with ours, theirs, selectors.DefaultSelector() as given:
        selector = flaky_selector("a", given, chaos=chaos)
        selector.register(ours, selectors.EVENT_READ, "data")
        assert len(selector.get_map()) == 1
        theirs.send(b"x")
        found = [selector.select(0.01) for _ in range(200)]
        assert {key.data for ready in found for key, _ in ready} == {"data"}
        assert any(not ready for ready in found)
        assert selector.unregister(ours).data == "data"


def test_each_child_process_has_a_seed_of_its_own():
    source = (
        "from sagellm.server import chaos\n"
        "print(chaos.notice(), chaos.child_environment()['SAGELLM_CHAOS'])\n"
        "print(chaos.child_environment()['SAGELLM_CHAOS'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, VARIABLE: "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:2] == ["; SAGELLM_CHAOS=7 injects faults 7.1", "7.2"]
