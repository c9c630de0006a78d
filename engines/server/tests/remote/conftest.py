"""Changes valid messages in the ways that a broken or hostile peer could, each decided by a seed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sagellm.testing.patience import wait_until

_FUZZ_SEED = int(os.environ.get("SAGELLM_FUZZ_SEED", "0"))
_LENGTH_BYTES = 4
_STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 50, 400, -1, -5, 1 << 31, 1 << 62, 1 << 63, -(1 << 63)),
    *(0.5, 1.0, 0.0, float("nan"), float("inf"), -1e300),
    *("", "x", "#", "\0", "é" * 40, "a" * 5000, b"", b"abc", b"\xff" * 8, b"\0" * 4096),
    *([], [[]], {}, {"a": 1}, [None] * 300, {str(n): n for n in range(40)}),
    *("stop", "length", "metrics", "add", "abort", "call", "step", "reply", "hello", "failed"),
)


class Mutator:
    """Makes frames from valid ones: most are broken in one place, so that decoders are passed far in."""

    def __init__(self, frames: list[bytes], seed: int) -> None:
        self._bodies = [frame[_LENGTH_BYTES:] for frame in frames]
        self._trees = [msgspec.msgpack.decode(body) for body in self._bodies]
        self._random = random.Random(1000 * _FUZZ_SEED + seed)
        self._ways: tuple[Callable[[], bytes], ...] = (
            *(self._flip, self._cut, self._splice, self._insert, self._lie),
            *[self._swap] * 5,
        )

    def __call__(self) -> bytes:
        """Return the next frame."""
        return self._random.choice(self._ways)()

    def _body(self) -> bytearray:
        return bytearray(self._random.choice(self._bodies))

    def _flip(self) -> bytes:
        body = self._body()
        for _ in range(self._random.choice((1, 1, 1, 2, 8))):
            body[self._random.randrange(len(body))] ^= 1 << self._random.randrange(8)
        return framed(body)

    def _cut(self) -> bytes:
        body = self._body()
        return framed(body[: self._random.randrange(len(body))])

    def _splice(self) -> bytes:
        one, two = self._body(), self._body()
        return framed(one[: self._random.randrange(len(one))] + two[self._random.randrange(len(two)) :])

    def _insert(self) -> bytes:
        body = self._body()
        position = self._random.randrange(len(body) + 1)
        body[position:position] = self._random.randbytes(self._random.choice((1, 2, 4, 16)))
        return framed(body)

    def _lie(self) -> bytes:
        """Claim another length than the frame has."""
        body = self._body()
        claimed = self._random.choice((0, len(body) - 1, len(body) // 2, 1 << 28, 0xFFFFFFFF))
        return claimed.to_bytes(_LENGTH_BYTES, "little") + body

    def _swap(self) -> bytes:
        """Put a value of any type in the place of another, or move, drop or repeat values, at any depth."""
        tree = msgspec.msgpack.decode(self._random.choice(self._bodies))
        for _ in range(self._random.choice((1, 1, 1, 2, 4))):
            if tree:
                self._swap_one(tree)
        return framed(msgspec.msgpack.encode(tree))

    def _swap_one(self, tree: list[Any]) -> None:
        container, key = self._place(tree)
        way = self._random.randrange(10)
        if way == 0 and isinstance(container, list):
            del container[key]
        elif way == 1 and isinstance(container, list):
            container.insert(key, deepcopy(container[key]))
        elif way == 2:
            other, other_key = self._place(tree)
            container[key] = deepcopy(other[other_key])
        elif way in (3, 4) and isinstance(container[key], bytes):
            container[key] = self._random.randbytes(self._random.choice((3, 4, 7, 8, 400)))
        else:
            is_alike = way < 8
            alike = [each for each in _STRANGE if type(each) is type(container[key])] if is_alike else []
            container[key] = deepcopy(self._random.choice(alike or _STRANGE))

    def _place(self, tree: list[Any]) -> tuple[Any, Any]:
        """Return a container in the tree and the key of one of its values, deep or not."""
        container: Any = tree
        while True:
            keys = list(container) if isinstance(container, dict) else range(len(container))
            key = self._random.choice(keys)
            value = container[key]
            if not isinstance(value, dict | list) or not value or self._random.random() < 0.2:
                return container, key
            container = value


def framed(body: bytes | bytearray) -> bytes:
    return len(body).to_bytes(_LENGTH_BYTES, "little") + bytes(body)


@pytest.fixture(scope="session")
def mutator() -> type[Mutator]:
    return Mutator


@pytest.fixture(scope="session")
def preloaded_python(tmp_path_factory) -> Iterator[str]:
    """What runs `python -m` as Python does, in a process that has imported torch and transformers already."""
    if not hasattr(os, "pidfd_open"):  # not on Linux
        yield sys.executable
        return
    folder = tmp_path_factory.mktemp("preloaded")
    process = subprocess.Popen([sys.executable, str(Path(__file__).with_name("preloaded.py")), str(folder)])
    path = folder / "python"
    wait_until(lambda: path.exists() or process.poll() is not None)
    assert process.poll() is None
    yield str(path)
    process.kill()
    process.wait()
