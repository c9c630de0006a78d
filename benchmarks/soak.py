"""Mixed load for a long time: `python benchmarks/soak.py --minutes 30`, or `hatch run soak --minutes 30`.

Serves a model (the embedded one) as `engine start` does, with three tenants, a small KV pool and tiers below
it. Clients send short and long prompts, chats that come back, several continuations at once and bad
requests, stop reading in the middle, and leave before the first byte. Meanwhile the memory of both
processes is sampled.

It holds, or the exit code is 1:
    no slope   least squares over the resident memory of either process, from when cache, ghosts and tiers
               are full and a third of the time is over: below 0.5 MiB per minute
    no leak    at the end no block is in use, no request runs or waits, and both processes are the first ones
    no drift   idle again, the server gives the tokens for the same requests that it gave at the beginning
    no wrong answer   every status was one that its request may have
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import httpx
import psutil
from common import RESULTS, describe_machine, save
from served import served

from sagellm.core import EngineMetrics
from sagellm.engines.embedded import EMBEDDED
from sagellm.server.remote.admin_client import AdminClient
from sagellm.server.remote.running_engine import RunningEngine

KEYS = ("soak-key-one", "soak-key-two", "soak-key-three")
MAX_SLOPE_MIB_PER_MIN = 0.5
SAMPLE_S = 2.0
WARM_SHARE = 1 / 3
"""Of the time, before the fit: torch keeps up to 1,024 compiled products, one for each size of a step."""
NUM_GHOSTS = 8192
SENTENCE = (
    "a river runs under the old bridge while bread and rain wait for seven green trains near some quiet town "
    "that every winter counts its lamps and letters before morning brings wind salt and slow blue boats"
)
VOCABULARY = SENTENCE.split()
TIERS = '{"host": "8MiB", "file": "16MiB"}'
FLAGS = (
    "--num-blocks=768",
    "--max-num-seqs=16",
    "--max-queued-requests=64",
    f"--kv-tiers={TIERS}",
    "--kv-fetch=always",
    f"--prefix-cache=radix{{max_ghost_blocks={NUM_GHOSTS}}}",
    *(f"--api-key={key}" for key in KEYS),
)

CANARIES: tuple[dict[str, Any], ...] = (
    {"prompt": "The river", "max_tokens": 48, "temperature": 0},
    {"prompt": " ".join(VOCABULARY * 12), "max_tokens": 48, "temperature": 0},
    {"prompt": [5 + 7 * index % 400 for index in range(900)], "max_tokens": 32, "temperature": 0},
    {"prompt": "Bread", "max_tokens": 32, "temperature": 1.0, "seed": 11},
    {"messages": [{"role": "user", "content": "Is it far to the sea?"}], "max_tokens": 48, "temperature": 0},
)

BAD: tuple[tuple[bytes, int], ...] = (
    (b"{", 400),
    (b"[]", 400),
    (b'{"prompt": []}', 400),
    (b'{"prompt": "x", "n": 1000000000}', 400),
    (b'{"prompt": "x", "temperature": -1}', 400),
    (b'{"prompt": "x", "max_tokens": -5}', 400),
    (b'{"prompt": "x", "no_such_parameter": 1}', 400),
    (b'{"prompt": [99999999]}', 400),
    (b'{"prompt": "\xff"}', 400),
    (b'{"prompt": "x", "model": "none of ours"}', 404),
    (b'{"prompt": "' + b"x" * 200_000 + b'"}', 400),
)


class Sample(NamedTuple):
    """A sample of the server under load."""

    at_s: float
    front_mib: float
    core_mib: float
    num_used_blocks: int
    num_evicted_blocks: int
    tier_share: float  # of the tiers' bytes that are in use
    num_running: int
    num_waiting: int
    num_files: int  # descriptors of both processes


class Slope(NamedTuple):
    """A straight line through samples."""

    mib_per_min: float
    standard_error: float
    num_samples: int

    @property
    def is_flat(self) -> bool:
        """Whether memory grows by less than `MAX_SLOPE_MIB_PER_MIN`."""
        return self.mib_per_min < MAX_SLOPE_MIB_PER_MIN


@dataclass
class Client:
    """One of the clients that make the load."""

    http: httpx.AsyncClient
    random: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    chat: list[dict[str, str]] = field(default_factory=list)

    async def run(self, until_s: float) -> None:
        """Send one request after another."""
        kinds, weights = zip(*LOAD, strict=True)
        while time.monotonic() < until_s:
            (kind,) = self.random.choices(kinds, weights)
            name = kind.__name__
            try:
                await kind(self)
                self.counts[name] += 1
            except httpx.HTTPError as error:
                self.wrong.append(f"{name}: {type(error).__name__}: {error}")
                await asyncio.sleep(1)

    def words(self, fewest: int, most: int) -> str:
        """Return a text that no other request has."""
        return " ".join(self.random.choices(VOCABULARY, k=self.random.randint(fewest, most)))

    def headers(self) -> dict[str, str]:
        """Return the key of one of the tenants."""
        return {"Authorization": f"Bearer {self.random.choice(KEYS)}"}

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Send a request; None if the queue was full, which is an answer too."""
        answer = await self.http.post(path, json=body, headers=self.headers())
        if answer.status_code == 200:
            found: dict[str, Any] = answer.json()
            return found
        self.expect(answer, 429, body)
        await asyncio.sleep(0.1)
        return None

    def expect(self, answer: httpx.Response, status: int, body: object) -> None:
        """Note an answer of another status."""
        self.counts[f"status {answer.status_code}"] += 1
        if answer.status_code != status:
            said = f"{answer.status_code} {answer.text[:300]} to {str(body)[:200]}"
            self.wrong.append(f"{status} wanted: {said}")


async def short(client: Client) -> None:
    """Complete a short prompt, greedily or not."""
    body = {"prompt": client.words(2, 30), "max_tokens": client.random.randint(1, 48)}
    more: dict[str, Any] = client.random.choice(({}, {"temperature": 0}, {"stop": ["."]}))
    await client.ask("/v1/completions", body | more)


async def long(client: Client) -> None:
    """Complete a prompt of some thousand tokens."""
    await client.ask("/v1/completions", {"prompt": client.words(600, 2000), "max_tokens": 16})


async def several(client: Client) -> None:
    """Ask for several continuations of several prompts, with log-probabilities."""
    prompts = [client.words(5, 60) for _ in range(client.random.randint(1, 3))]
    body = {"prompt": prompts, "n": 3, "max_tokens": 16, "temperature": 1.0, "logprobs": 2}
    await client.ask("/v1/completions", body)


async def turn(client: Client) -> None:
    """Continue a conversation, up to eight turns."""
    if len(client.chat) > 16:
        client.chat.clear()
    client.chat.append({"role": "user", "content": client.words(5, 60)})
    answer = await client.ask("/v1/chat/completions", {"messages": client.chat, "max_tokens": 32})
    if answer is None:
        client.chat.pop()
    else:
        content = answer["choices"][0]["message"]["content"]
        client.chat.append({"role": "assistant", "content": content})


async def stop_reading(client: Client) -> None:
    """Close a stream in the middle."""
    body = {"prompt": client.words(5, 200), "max_tokens": 400, "stream": True, "ignore_eos": True}
    stream = client.http.stream("POST", "/v1/completions", json=body, headers=client.headers())
    num_left = client.random.randint(1, 30)
    async with stream as answer:
        if answer.status_code != 200:
            await answer.aread()
            client.expect(answer, 429, body)
            return
        async for _ in answer.aiter_lines():
            num_left -= 1
            if not num_left:
                break


async def leave(client: Client) -> None:
    """Disconnect before the first byte of the answer."""
    body = {"prompt": client.words(600, 1500), "max_tokens": 200}
    with suppress(TimeoutError):
        async with asyncio.timeout(client.random.uniform(0.001, 0.3)):
            await client.http.post("/v1/completions", json=body, headers=client.headers())


async def bad(client: Client) -> None:
    """Send an invalid request. Where its key's queue is full, nobody reads it."""
    body, status = client.random.choice(BAD)
    headers = {**client.headers(), "Content-Type": "application/json"}
    answer = await client.http.post("/v1/completions", content=body, headers=headers)
    client.expect(answer, 429 if answer.status_code == 429 else status, body)


async def stranger(client: Client) -> None:
    """Send a request with a wrong key."""
    body, headers = {"prompt": "x"}, {"Authorization": "Bearer nobody's"}
    answer = await client.http.post("/v1/completions", json=body, headers=headers)
    client.expect(answer, 401, body)


Kind = Callable[[Client], Awaitable[None]]
LOAD: tuple[tuple[Kind, int], ...] = (
    (short, 30),
    (turn, 20),
    (several, 10),
    (long, 10),
    (stop_reading, 10),
    (leave, 8),
    (bad, 10),
    (stranger, 2),
)
"""What a client sends, and how often."""


class Server:
    """The processes of a running engine."""

    def __init__(self, engine: RunningEngine) -> None:
        self.front = psutil.Process(engine.pid)
        self._socket = engine.socket
        self.core = psutil.Process(self.ask().hello_pid)

    class _Said(NamedTuple):
        hello_pid: int
        metrics: EngineMetrics

    def ask(self) -> _Said:
        """Ask the core how it is."""
        with AdminClient.connect(self._socket, timeout_s=60) as admin:
            return self._Said(admin.hello.pid, admin.metrics())

    def sample(self, at_s: float) -> Sample:
        """Measure both processes."""
        metrics = self.ask().metrics
        pool, cache = metrics.modules["kv_pool"], metrics.modules["prefix_cache"]
        tiers = metrics.modules["kv_tier"]["tiers"]
        return Sample(
            at_s=round(at_s, 2),
            front_mib=self.front.memory_info().rss / 2**20,
            core_mib=self.core.memory_info().rss / 2**20,
            num_used_blocks=pool.num_used_blocks,
            num_evicted_blocks=cache.num_evicted_blocks,
            tier_share=tiers["num_bytes"] / tiers["max_bytes"],
            num_running=metrics.num_running,
            num_waiting=metrics.num_waiting,
            num_files=self.front.num_fds() + self.core.num_fds(),
        )

    def leftovers(self) -> dict[str, int]:
        """Return what the idle server still holds: all zeros unless something leaks."""
        metrics = self.ask().metrics
        pool, cache = metrics.modules["kv_pool"], metrics.modules["prefix_cache"]
        return {
            "running": metrics.num_running,
            "waiting": metrics.num_waiting,
            "locked blocks": cache.num_locked_blocks,
            "blocks in use": pool.num_used_blocks - cache.num_blocks,
        }

    @property
    def is_the_first(self) -> bool:
        """Whether neither process has been restarted."""
        return self.front.is_running() and self.core.is_running() and self.ask().hello_pid == self.core.pid


def fit(samples: Sequence[Sample], value: Callable[[Sample], float]) -> Slope:
    """Fit a line by least squares to means over ten seconds, whose errors depend on each other less."""
    buckets: dict[int, list[Sample]] = {}
    for sample in samples:
        buckets.setdefault(int(sample.at_s // 10), []).append(sample)
    points = [(fmean(one.at_s for one in many) / 60, fmean(map(value, many))) for many in buckets.values()]
    if len(points) < 3:
        return Slope(math.nan, math.nan, len(points))
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    residuals = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    error = math.sqrt(residuals / (len(points) - 2) / spread)
    return Slope(round(slope, 4), round(error, 4), len(points))


def settled_s(samples: Sequence[Sample], num_blocks: int) -> float | None:
    """Return when all that fills up was full: the cache once, the ghosts, and the tiers."""
    for sample in samples:
        if sample.num_evicted_blocks > num_blocks + NUM_GHOSTS and sample.tier_share > 0.9:
            return sample.at_s
    return None


async def answers(http: httpx.AsyncClient) -> list[list[str]]:
    """Return the server's answers to the canaries, asked one after another."""
    found = []
    for body in CANARIES:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = await http.post(path, json=body, headers={"Authorization": f"Bearer {KEYS[0]}"})
        answer.raise_for_status()
        choices = answer.json()["choices"]
        found.append([each["text"] if "text" in each else each["message"]["content"] for each in choices])
    return found


async def put_load(server: Server, http: httpx.AsyncClient, options: argparse.Namespace) -> list[Any]:
    """Run the clients and sample meanwhile; return the clients and the samples."""
    started_s = time.monotonic()
    until_s = started_s + 60 * options.minutes
    clients = [Client(http, random.Random(f"{options.seed}/{number}")) for number in range(options.clients)]
    tasks = [asyncio.create_task(client.run(until_s)) for client in clients]
    samples: list[Sample] = []
    shown_s = started_s
    while not all(task.done() for task in tasks):
        await asyncio.sleep(SAMPLE_S)
        now_s = time.monotonic()
        if now_s < until_s:
            samples.append(await asyncio.to_thread(server.sample, now_s - started_s))
        if now_s - shown_s > 30:
            shown_s, num_sent = now_s, sum(client.counts.total() for client in clients)
            last = samples[-1]
            print(
                f"{(now_s - started_s) / 60:.1f} min, {num_sent} requests, front {last.front_mib:.1f} MiB, "
                f"core {last.core_mib:.1f} MiB, {last.num_used_blocks} blocks, {last.num_evicted_blocks} "
                f"evicted, tiers {last.tier_share:.0%}, {sum(len(each.wrong) for each in clients)} wrong",
                file=sys.stderr,
                flush=True,
            )
    await asyncio.gather(*tasks)
    return [clients, samples]


async def wait_until_idle(server: Server) -> dict[str, int]:
    """Wait up to ten seconds for the clients' last requests to end; return what is left."""
    deadline_s = time.monotonic() + 10
    while any((left := await asyncio.to_thread(server.leftovers)).values()) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.2)
    return left


async def soak(engine: RunningEngine, options: argparse.Namespace) -> dict[str, Any]:
    """Load a server and return the record."""
    server = Server(engine)
    limits = httpx.Limits(max_connections=4 * options.clients)
    async with httpx.AsyncClient(base_url=engine.url, timeout=120, limits=limits) as http:
        await answers(http)  # what runs for the first time allocates
        before = await answers(http)
        clients, samples = await put_load(server, http, options)
        leftovers = await wait_until_idle(server)
        after = await answers(http)
    num_blocks = server.ask().metrics.modules["kv_pool"].total_blocks
    settled = settled_s(samples, num_blocks)
    half_s = 30 * options.minutes
    begin_s = max(60 * options.minutes * WARM_SHARE, half_s if settled is None else settled)
    fitted = [sample for sample in samples if sample.at_s >= begin_s]
    front, core = fit(fitted, lambda one: one.front_mib), fit(fitted, lambda one: one.core_mib)
    counts = sum((client.counts for client in clients), Counter[str]())
    wrong = [each for client in clients for each in client.wrong]
    verdicts = {
        "no slope": front.is_flat and core.is_flat,
        "no leak": not any(leftovers.values()) and server.is_the_first,
        "no drift": before == after,
        "no wrong answer": not wrong,
    }
    return {
        "benchmark": "soak",
        "minutes": options.minutes,
        "clients": options.clients,
        "seed": options.seed,
        "flags": [flag for flag in FLAGS if not flag.startswith("--api-key")],
        "requests": dict(sorted(counts.items())),
        "wrong_answers": {"number": len(wrong), "first": wrong[:20]},
        "full_from_s": settled,
        "fitted_from_s": begin_s,
        "front": front._asdict(),
        "core": core._asdict(),
        "leftovers": leftovers,
        "canaries_equal": [one == other for one, other in zip(before, after, strict=True)],
        "verdicts": verdicts,
        "machine": describe_machine(),
        "samples": {
            name: [round(value, 2) for value in column]
            for name, column in zip(Sample._fields, zip(*samples, strict=True), strict=True)
        },
    }


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw the memory of both processes over time."""
    from matplotlib.figure import Figure

    samples = record["samples"]
    minutes = [at_s / 60 for at_s in samples["at_s"]]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name in ("front", "core"):
        slope = record[name]
        label = f"{name}: {slope['mib_per_min']:+.3f} ± {slope['standard_error']:.3f} MiB/min"
        axes.plot(minutes, samples[f"{name}_mib"], label=label)
    axes.axvline(record["fitted_from_s"] / 60, color="grey", linestyle=":", label="fitted from here")
    axes.set(xlabel="minutes", ylabel="resident memory (MiB)", ylim=(0, None))
    axes.set_title(f"{path.stem}: memory of both processes")
    figure.legend(loc="outside lower center", ncols=2)  # in the frame it would hide data
    figure.savefig(path)


def main() -> int:
    """Serve, run the load, print the verdicts."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--port", type=int, default=8769)
    parser.add_argument("--save", type=Path, default=RESULTS / "soak.json", help="default: %(default)s")
    options = parser.parse_args()
    with served(options.model, options.port, *FLAGS) as engine:
        record = asyncio.run(soak(engine, options))
    save(options.save, json.dumps(record, indent=1) + "\n")
    plot(record, options.save.with_suffix(".png"))
    for name in ("front", "core"):
        slope = Slope(**record[name])
        if math.isnan(slope.mib_per_min):
            print(f"{name}: no slope was measured: {slope.num_samples} of 3 points; give it more --minutes")
        else:
            print(f"{name}: {slope.mib_per_min:+.3f} ± {slope.standard_error:.3f} MiB/min")
    print(f"requests: {record['requests']}")
    if record["wrong_answers"]["number"]:
        print(f"wrong answers: {json.dumps(record['wrong_answers'], indent=1)}")
    print(f"left over: {record['leftovers']}")
    for name, holds in record["verdicts"].items():
        print(f"{name}: {'holds' if holds else 'FAILS'}")
    print(f"kept in {options.save}, drawn in {options.save.with_suffix('.png')}")
    return 0 if all(record["verdicts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
