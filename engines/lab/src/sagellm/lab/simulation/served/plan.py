"""What happens in one simulated run, drawn from its seed: the engine's settings, requests and faults."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, TypeAlias

from sagellm.lab.simulation.served.oracle import BLOCK_SIZE, VOCAB

FAULTY_S = 12.0
"""Faults occur for this long; then they cease."""

HANGS = 1e6
"""The value of a freeze that ends only when the process is killed."""

Behaviour = Literal["read", "slow", "leave", "half close"]
"""What a client does: read all, read with pauses, disconnect midway, or end its half after the request."""

FaultKind = Literal[
    "kill",  # SIGKILL of the core
    "freeze",  # SIGSTOP of the core, for a while
    "lose link",  # reset of the connection between front and core
    "lose client",  # reset of a client's connection
    "late",  # a spell in which some data is late
    "pieces",  # a spell in which data arrives in pieces
    "disk full",  # a spell in which writes fail with ENOSPC
    "disk error",  # a spell in which reads and writes fail with EIO
    "bit rot",  # a spell in which reads have wrong bits
    "descriptors",  # a spell in which accept, open and spawn fail with EMFILE
    "clock",  # a step of the wall clock, in seconds
    "compact",  # and other things that an operator does
    "evict",
    "clear",
    "metrics",
]
_SPELLS: tuple[FaultKind, ...] = ("late", "pieces", "disk full", "disk error", "bit rot", "descriptors")
_OPERATOR: tuple[FaultKind, ...] = (
    *("compact", "compact", "compact", "evict", "evict", "evict"),
    *("clear", "metrics"),
)
_DEADLY: tuple[FaultKind, ...] = ("kill", "freeze", "lose link")
_MAX_DEADLY = 6


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A client's request, sent again until it is answered, unless the client leaves."""

    number: int
    at_s: float
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    num_choices: int
    is_streamed: bool
    tenant: int  # which API key
    salt: str
    stop: str | None
    behaviour: Behaviour
    leaves_after_bytes: int = 0
    is_deadly: bool = False  # whether it ends each process of the core that computes it

    def __str__(self) -> str:
        sizes = "+".join(str(len(prompt)) for prompt in self.prompts)
        how = "streamed" if self.is_streamed else "whole"
        extra = "".join(
            (
                f", n={self.num_choices}" * (self.num_choices > 1),
                f", stop {self.stop!r}" * bool(self.stop),
                ", deadly" * self.is_deadly,
            )
        )
        return (
            f"{self.at_s:7.3f} s  request {self.number}: {sizes} → {self.max_tokens} tokens, {how}, tenant "
            f"{self.tenant}/{self.salt or '-'}, {self.behaviour}{extra}"
        )


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong, or that an operator does. `value` is how long or how much."""

    at_s: float
    kind: FaultKind
    value: float = 0.0

    def __str__(self) -> str:
        return f"{self.at_s:7.3f} s  {self.kind} {self.value:g}"


Event: TypeAlias = Ask | Fault


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run: everything in it follows from these values."""

    seed: int
    settings: Mapping[str, Any]  # of the configuration, by dotted key
    client_buffer_bytes: int  # of sockets between clients and front
    link_buffer_bytes: int  # of sockets between front and core
    num_host_blocks: int  # of the tier in host memory, which is above one in a file
    events: tuple[Event, ...]
    numbers: tuple[int, ...] = ()  # which events of the seed's plan these are

    def only(self, numbers: Container[int]) -> Plan:
        """Return the plan with only some of its events, by their numbers."""
        kept = [
            (number, event)
            for number, event in zip(self.numbers, self.events, strict=True)
            if number in numbers
        ]
        return replace(
            self, events=tuple(event for _, event in kept), numbers=tuple(number for number, _ in kept)
        )


def draw_plan(seed: int, *, num_requests: int = 10) -> Plan:
    """Draw a run from its seed."""
    random = Random(f"served/{seed}")
    settings = {
        "kv.block_size": BLOCK_SIZE,
        "kv.num_blocks": random.choice((20, 24, 40)),
        "kv.allocator": random.choice(("free_list", "buddy")),
        "kv.fetch": random.choice(("always", "always", "cheaper")),
        "prefix_cache.eviction_policy": random.choice(("reuse", "lru", "s3fifo")),
        "scheduler.max_num_batched_tokens": random.choice((8, 16, 64)),
        "scheduler.max_num_seqs": random.choice((4, 8)),
        "server.max_queued_requests": random.choice((2, 16)),
        "server.max_connections": random.choice((6, 4096)),
        "server.frozen_after_s": 4.0,
    }
    bursts = [random.uniform(0, FAULTY_S) for _ in range(3)]
    asks = _draw_asks(random, num_requests, bursts)
    faults = _draw_faults(random, bursts)
    if random.random() < 0.2:
        deadly = random.randrange(len(asks))
        asks[deadly] = replace(asks[deadly], is_deadly=True)
    both: list[Event] = [*asks, *faults]
    events = tuple(sorted(both, key=lambda event: event.at_s))
    return Plan(
        seed=seed,
        settings=settings,
        client_buffer_bytes=random.choice((128, 1024, 1 << 16)),
        link_buffer_bytes=random.choice((512, 1 << 16)),
        num_host_blocks=random.choice((0, 4, 40)),
        events=events,
        numbers=tuple(range(len(events))),
    )


def _draw_asks(random: Random, count: int, bursts: list[float]) -> list[Ask]:
    families = [_draw_tokens(random, random.randint(8, 40)) for _ in range(2)]
    return [_draw_ask(random, number, families, random.choice(bursts)) for number in range(count)]


def _draw_ask(random: Random, number: int, families: list[tuple[int, ...]], burst_s: float) -> Ask:
    behaviour: Behaviour = random.choices(("read", "slow", "leave", "half close"), (10, 2, 4, 2))[0]
    num_prompts = random.choices((1, 2, 3), (8, 1, 1))[0]
    return Ask(
        number=number,
        at_s=burst_s + random.expovariate(20),
        prompts=tuple(_draw_prompt(random, families) for _ in range(num_prompts)),
        max_tokens=random.randint(1, 24),
        num_choices=random.choices((1, 2), (8, 1))[0],
        is_streamed=random.random() < 0.6,
        tenant=random.choice((0, 0, 0, 1)),
        salt=random.choice(("", "", "", "s")),
        stop="".join(random.choices("abcdefgh", k=1)) if random.random() < 0.2 else None,
        behaviour=behaviour,
        leaves_after_bytes=random.choice((0, 0, 100, 500, 2000)) if behaviour == "leave" else 0,
    )


def _draw_prompt(random: Random, families: list[tuple[int, ...]]) -> tuple[int, ...]:
    family = random.choice(families)
    return family[: random.randint(4, len(family))] + _draw_tokens(random, random.randint(0, 6))


def _draw_tokens(random: Random, count: int) -> tuple[int, ...]:
    return tuple(random.randrange(VOCAB) for _ in range(count))


def _draw_faults(random: Random, bursts: list[float]) -> list[Fault]:
    """Draw spells, and single faults at any time, just after the start of a spell, or while there is load."""
    spells = [
        Fault(at_s=random.uniform(0, FAULTY_S), kind=kind, value=random.uniform(0.5, 8))
        for kind in _SPELLS
        if random.random() < 0.4
    ]

    def moment_s() -> float:
        loaded_s = random.choice(bursts) + random.uniform(0, 0.4)
        return random.choice((loaded_s, loaded_s, random.uniform(0, FAULTY_S), *starts))

    starts = [spell.at_s + 0.3 for spell in spells]
    deadly = [
        Fault(
            at_s=moment_s(),
            kind=random.choice(_DEADLY),
            value=random.choice((HANGS, random.uniform(0.1, 8))),
        )
        for _ in range(random.choice((0, 0, 1, 1, 2, _MAX_DEADLY)))
    ]
    others = [
        Fault(at_s=moment_s(), kind=random.choice((*_OPERATOR, "lose client")))
        for _ in range(random.randint(0, 8))
    ]
    if random.random() < 0.5:
        others += [Fault(at_s=start_s + random.uniform(0.05, 0.25), kind="compact") for start_s in bursts]
    steps = [Fault(at_s=moment_s(), kind="clock", value=random.choice((-3600.0, 3600.0)))]
    return [*spells, *deadly, *others, *(steps if random.random() < 0.3 else ())]
