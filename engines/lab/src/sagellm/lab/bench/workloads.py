"""Named loads of conversations, batches and documents: sessions that share prefixes, from a seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random
from typing import NamedTuple

from sagellm.core import ConfigError, TokenIds, nearest, pack
from sagellm.lab.bench.prompts import check_vocab_size, draw_ids
from sagellm.lab.traces.lengths import Lengths

_MAX_TURNS = 12


class Turn(NamedTuple):
    """One request of a session: its whole prompt, and how long its sender waits before sending it."""

    think_s: float
    token_ids: TokenIds
    num_output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Session:
    """Requests that one sender sends, each after the answer to the one before."""

    kind: str
    priority: int  # a larger number is more urgent
    turns: tuple[Turn, ...]


@dataclass(frozen=True, kw_only=True)
class SessionKind:
    """How sessions of one kind go: lengths in tokens, times in seconds.

    A prompt begins with one of `num_commons` common beginnings of `common_len` tokens, then what its session
    alone says. After each turn the sender goes on with probability `go_on`, with the answer and new text
    appended. `share` is the weight of this kind in a mixture.
    """

    share: float
    priority: int = 0
    num_commons: int = 1
    common_len: int = 0
    own_len: Lengths  # of the first turn, behind the common beginning
    user_len: Lengths  # of every further turn
    output_len: Lengths
    go_on: float = 0.0
    think_s: float = 0.0  # mean of an exponential distribution


def _kind(own: str, output: str, user: str | None = None, **more: float) -> SessionKind:
    parse = Lengths.parse
    return SessionKind(
        own_len=parse(own),
        user_len=parse(user or own),
        output_len=parse(output),
        **more,  # type: ignore[arg-type]
    )


_CHAT = _kind(
    "lognormal:60:0.6", "lognormal:100:0.5",
    share=0.55, priority=1, num_commons=4, common_len=256, go_on=0.75, think_s=5.0,
)  # fmt: skip
_BATCH = _kind("lognormal:120:0.5", "lognormal:60:0.3", share=0.3, priority=-1, num_commons=6, common_len=384)
_DOCUMENT = _kind(
    "lognormal:600:0.4", "lognormal:80:0.4", "lognormal:30:0.4", share=0.15, go_on=0.6, think_s=3.0
)

WORKLOADS: dict[str, Mapping[str, SessionKind]] = {
    "mixed": {"chat": _CHAT, "batch": _BATCH, "document": _DOCUMENT},
    "chat": {"chat": _CHAT},
    "batch": {"batch": _BATCH},
    "document": {"document": _DOCUMENT},
    # Lengths and turns like those of the conversations that serving papers replay: short questions with a
    # long tail, long answers, no common beginning.
    "sharegpt": {
        "conversation": _kind("lognormal:45:1.3", "lognormal:160:0.8", share=1.0, go_on=0.7, think_s=10.0)
    },
}
"""Name of a load → its kinds of sessions."""

HIGH_PRIORITY = 1
"""Requests of this priority and above count as those of high priority."""


@dataclass(frozen=True, kw_only=True)
class WorkloadSettings:
    """Which load, with token ids below `vocab_size` and sessions that fit into `max_len` tokens."""

    name: str = "mixed"
    vocab_size: int = 4000
    max_len: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in WORKLOADS:
            known = ", ".join(WORKLOADS)
            raise ConfigError(
                f"the workload is {self.name!r}; there are {known}.{nearest(self.name, WORKLOADS)}"
            )
        check_vocab_size(self.vocab_size)
        if self.max_len < 2:
            raise ConfigError(f"max_len is {self.max_len}; it must be at least 2")


def make_sessions(settings: WorkloadSettings) -> Iterator[Session]:
    """Yield sessions without end; the same settings give the same ones, another seed shares no prefix."""
    kinds = WORKLOADS[settings.name]
    rng = Random(f"workload {settings.name} {settings.seed}")
    commons = {
        name: [draw_ids(rng, kind.common_len, settings.vocab_size) for _ in range(kind.num_commons)]
        for name, kind in kinds.items()
    }
    names, weights = list(kinds), [kind.share for kind in kinds.values()]
    for _ in count():
        name = rng.choices(names, weights)[0]
        turns = _turns(kinds[name], rng.choice(commons[name]), settings, rng)
        yield Session(kind=name, priority=kinds[name].priority, turns=tuple(turns))


def mean_turns(settings: WorkloadSettings, num_sessions: int = 300) -> float:
    """Return the mean number of requests in a session, from the first sessions."""
    sessions = make_sessions(settings)
    return sum(len(next(sessions).turns) for _ in range(num_sessions)) / num_sessions


def _turns(kind: SessionKind, common: list[int], settings: WorkloadSettings, rng: Random) -> Iterator[Turn]:
    """Yield the turns that fit; the first one is cut where it does not."""
    draw, max_len = partial(draw_ids, rng, vocab_size=settings.vocab_size), settings.max_len
    num_output = min(kind.output_len.draw(rng), max_len // 2)
    said = (common + draw(kind.own_len.draw(rng)))[: max_len - num_output]
    yield Turn(0.0, pack(said), num_output)
    for _ in range(_MAX_TURNS - 1):
        if rng.random() >= kind.go_on:
            return
        # What the sender heard is drawn, not what the server said: all servers get the same prompts.
        said = said + draw(num_output) + draw(kind.user_len.draw(rng))
        num_output = kind.output_len.draw(rng)
        if len(said) + num_output > max_len:
            return
        yield Turn(rng.expovariate(1 / kind.think_s) if kind.think_s else 0.0, pack(said), num_output)
