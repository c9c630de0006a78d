"""Loads of eight kinds, made from a seed: what an eviction policy may meet, some of it made to mislead it.

Prompts are made of named blocks. Where a kind `has_ends`, a prompt's last block is partial and its own, as
in traces of hashed blocks; else prompts are whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

from sagellm.core import TraceRequest

Load = Callable[[int, int], list[TraceRequest]]
"""Seed, number of prompts → the prompts, by arrival."""


class Prompts:
    """Collects prompts; every block that is written is a new one."""

    def __init__(self, seed: int, block_tokens: int, *, has_ends: bool = False) -> None:
        self.random = Random(seed)
        self.made: list[TraceRequest] = []
        self._block_tokens, self._has_ends = block_tokens, has_ends
        self._ids = count(1)

    def text(self, mean_blocks: float) -> list[int]:
        """Write so many blocks in the mean, at least one."""
        return [next(self._ids) for _ in range(max(1, round(self.random.gammavariate(2, mean_blocks / 2))))]

    def ask(self, time_s: float, path: list[int], conversation: str = "", tenant: str = "") -> None:
        """Send a prompt."""
        blocks, num_tokens = list(path), len(path) * self._block_tokens
        if self._has_ends:
            blocks.append(next(self._ids))
            num_tokens += self.random.randrange(1, self._block_tokens)
        self.made.append(
            TraceRequest(
                time_s,
                num_tokens,
                64,
                tuple(blocks),
                self._block_tokens,
                tenant=tenant,
                conversation=conversation,
            )
        )

    def first(self, num_prompts: int) -> list[TraceRequest]:
        """Return the first ones that arrive."""
        return sorted(self.made, key=lambda one: one.arrival_s)[:num_prompts]


@dataclass(frozen=True, kw_only=True)
class Talk:
    """How the conversations of one kind go on; sizes in blocks, times in seconds."""

    go_on: Callable[[int], float]  # number of the turn → chance of another
    gap_s: tuple[float, float]  # median, sigma of the log-normal
    said: float = 4.0
    rate: float = 1.0
    burstiness: float = 1.0  # 1 is Poisson
    num_systems: int = 1
    system: float = 4.0
    prefix: str = ""
    tenant: str = ""


def talk(prompts: Prompts, kind: Talk, start_s: float, num_prompts: int) -> float:
    """Let conversations begin until they have so many prompts; returns when the last one began."""
    random, end = prompts.random, len(prompts.made) + num_prompts
    systems = [prompts.text(kind.system) for _ in range(kind.num_systems)]
    now_s = start_s
    for index in count():
        if len(prompts.made) >= end:
            return now_s
        now_s += random.gammavariate(kind.burstiness, 1 / (kind.rate * kind.burstiness))
        path, time_s = list(random.choice(systems)), now_s
        name = f"{kind.prefix}{index}"
        for turn in count(1):
            path = path + prompts.text(kind.said)
            prompts.ask(time_s, path, name, kind.tenant)
            if random.random() >= kind.go_on(turn):
                break
            path = path + prompts.text(kind.said / 2)  # the answer
            time_s += random.lognormvariate(math.log(kind.gap_s[0]), kind.gap_s[1])
    raise AssertionError("count() has no end")


def _chat_goes_on(turn: int) -> float:
    return min(0.85, 0.25 + 0.08 * turn)


def agent_sessions(seed: int, num_prompts: int) -> list[TraceRequest]:
    """Long sessions behind a few long system prompts: a step every few seconds, now and then a pause."""
    prompts = Prompts(seed, 32)
    random = prompts.random
    systems = [prompts.text(30) for _ in range(3)]
    now_s = 0.0
    while len(prompts.made) < 1.3 * num_prompts:
        now_s += random.expovariate(0.08)
        path, time_s = list(random.choice(systems)), now_s
        for _ in range(1 + int(random.expovariate(1 / 18))):
            path = path + prompts.text(5)
            prompts.ask(time_s, path, str(now_s))
            time_s += (
                random.lognormvariate(1.8, 0.6) if random.random() < 0.92 else random.expovariate(1 / 240)
            )
            if random.random() < 0.03:  # what was read is cut out again
                path = path[: len(path) * 2 // 3]
    return prompts.first(num_prompts)


def chat(seed: int, num_prompts: int) -> list[TraceRequest]:
    """Conversations of which the longer ones are likelier to go on."""
    prompts = Prompts(seed, 128, has_ends=True)
    talk(prompts, Talk(go_on=_chat_goes_on, gap_s=(90, 0.9), said=8, rate=2.0), 0.0, 5 * num_prompts // 4)
    return prompts.first(num_prompts)


def one_shot(seed: int, num_prompts: int) -> list[TraceRequest]:
    """Questions that nobody comes back to, behind system prompts of very different popularity."""
    prompts = Prompts(seed, 16)
    random = prompts.random
    systems = [prompts.text(40) for _ in range(60)]
    popularity = [1 / rank for rank in range(1, 61)]
    now_s = 0.0
    for _ in range(num_prompts):
        now_s += random.expovariate(2.0)
        system = random.choices(systems, popularity)[0]
        prompts.ask(now_s, system + prompts.text(6))
    return prompts.made


def scans(seed: int, num_prompts: int) -> list[TraceRequest]:
    """Chat, through which long documents pass in turns of a few questions each, and never again."""
    prompts = Prompts(seed, 64, has_ends=True)
    end_s = talk(
        prompts, Talk(go_on=lambda _: 0.7, gap_s=(60, 0.7), said=5, rate=0.8), 0.0, 7 * num_prompts // 8
    )
    random, now_s = prompts.random, 0.0
    while now_s < end_s:
        now_s += random.expovariate(1 / 150)
        for _ in range(12):
            document = prompts.text(40)
            for question in range(random.choice((1, 1, 2))):
                prompts.ask(now_s + 5.0 * question, document + prompts.text(2))
            now_s += 1.0
    return prompts.first(num_prompts)


def shift(seed: int, num_prompts: int) -> list[TraceRequest]:
    """Conversations that get likelier with each turn and, from the middle on, such that soon end."""
    prompts = Prompts(seed, 64)
    before = Talk(go_on=_chat_goes_on, gap_s=(80, 0.7), said=6, rate=1.5, prefix="a")
    after = Talk(go_on=lambda turn: 0.9 if turn < 3 else 0.05, gap_s=(25, 0.5), said=6, rate=1.0, prefix="b")
    end_s = talk(prompts, before, 0.0, num_prompts // 2)
    talk(prompts, after, end_s, num_prompts // 2)
    return prompts.first(num_prompts)


def nearly_all(seed: int, num_prompts: int) -> list[TraceRequest]:
    """People who all come back again and again, each at a pace of their own."""
    prompts = Prompts(seed, 32, has_ends=True)
    random = prompts.random
    num_people = num_prompts // 12
    system = prompts.text(6)
    for person in range(num_people):
        pace_s, time_s = random.lognormvariate(math.log(600), 0.8), random.uniform(0, 1200)
        path = list(system)
        for _ in range(40):
            if time_s > 7200:
                break
            path = path + prompts.text(6)
            prompts.ask(time_s, path, str(person))
            time_s += pace_s * random.lognormvariate(0, 0.5)
            if random.random() < 0.1:
                path = list(system)
    return prompts.first(num_prompts)


def bursts(seed: int, num_prompts: int) -> list[TraceRequest]:
    """Chat that comes in bursts, with long silence between, and short answers to many at once."""
    prompts = Prompts(seed, 256, has_ends=True)
    kind = Talk(
        go_on=lambda turn: 0.4 if turn < 3 else 0.75, gap_s=(45, 1.1), said=5, rate=1.5, burstiness=0.05
    )
    talk(prompts, kind, 0.0, 5 * num_prompts // 4)
    return prompts.first(num_prompts)


def two_tenants(seed: int, num_prompts: int) -> list[TraceRequest]:
    """One tenant chats, another sends batches over a few templates: whoever came lately is done."""
    prompts = Prompts(seed, 64)
    kind = Talk(
        go_on=lambda _: 0.75, gap_s=(120, 0.8), said=6, rate=0.5, num_systems=2, prefix="a", tenant="a"
    )
    end_s = talk(prompts, kind, 0.0, 5 * num_prompts // 8)
    random, now_s = prompts.random, 0.0
    while now_s < end_s:
        now_s += random.expovariate(1 / 120)
        template = prompts.text(12)
        for _ in range(random.randrange(20, 80)):
            prompts.ask(now_s, template + prompts.text(5), tenant="b")
            now_s += random.expovariate(4.0)
    return prompts.first(num_prompts)


LOADS: dict[str, Load] = {
    load.__name__.replace("_", " "): load
    for load in (agent_sessions, chat, one_shot, scans, shift, nearly_all, bursts, two_tenants)
}


def num_distinct_blocks(requests: list[TraceRequest]) -> int:
    """Count the blocks of a load: its working set. Tenants share none."""
    return len({(one.tenant, block_id) for one in requests for block_id in one.block_ids})


def loads(seed: int, num_prompts: int) -> Iterator[tuple[str, list[TraceRequest]]]:
    """Make one load of each kind."""
    for name, load in LOADS.items():
        yield name, load(seed, num_prompts)
