"""Whether one API key can take the engine from another: `python benchmarks/tenants.py`.

On the server itself, `sage llm serve` with the embedded model and a key file, in processes of its own. Four
bars, and the exit status is 1 if one of them fails:

(a) One key floods: 8 streams with `priority: -1000`, then 2 requests with `n: 128`. The other key's time to
the first token, from its request to the first event, is below twice its time alone plus one step, at the
median. The step is the mean one during the flood: seconds ÷ steps, by the engine's own count.
(b) Five keys of weights 1 to 5 always have more waiting than they can run. Jain's index over service ÷
weight is at least 0.95, where the service is output tokens, by the engine's count, in a window in which all
five have a backlog.
(c) One key sends jobs of a costly shape, one after another: parameters that are much larger than the prompts,
up to what one job may have and beyond, or answers that are. Beside each, the other key's time is below twice
its time alone plus three steps: one in flight, its own, and one as an arrival rather meets the long ones.
Jobs of 500 short prompts, which have nothing large, stand beside them.
(d) A key that exceeds its quotas gets 429, with the code of the quota; another key, meanwhile, only 200.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import httpx
from common import foreign_cores, report, spread
from served import served

from sagellm.engines.embedded import EMBEDDED
from sagellm.engines.metrics.fairness import jains_index

FLOOD, OTHER = "sk-flood", "sk-other"
WEIGHTS = (1, 2, 3, 4, 5)
LEAST_INDEX = 0.95
_WAIT_S = 60.0
_SEEDS = count(100)  # of the other key's prompts


@dataclass(frozen=True)
class Client:
    """Sends requests of one key to the server under test."""

    http: httpx.AsyncClient
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    async def status(self, **fields: Any) -> tuple[int, str | None, str | None]:
        """Return status, error code and Retry-After of a whole answer."""
        answer = await self.http.post("/v1/completions", json=fields, headers=self.headers)
        error = answer.json().get("error") or {}
        return answer.status_code, error.get("code"), answer.headers.get("retry-after")

    async def ttft_s(self, **fields: Any) -> float:
        """Return the time to the first event with text of a stream, and read it to its end."""
        started = time.perf_counter()
        first = None
        async for line in self.lines(**fields):
            if first is None and line.startswith("data: {"):
                first = time.perf_counter() - started
        assert first is not None, "a stream had no event"
        return first

    async def lines(self, **fields: Any) -> AsyncIterator[str]:
        """Yield the lines of a stream. Raises RuntimeError for an answer that is not 200."""
        body = {**fields, "stream": True}
        async with self.http.stream("POST", "/v1/completions", json=body, headers=self.headers) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                yield line

    async def drain(self, seen: Callable[[], None], **fields: Any) -> None:
        """Read a stream to its end; call `seen` for its first line."""
        is_first = True
        async for _ in self.lines(**fields):
            if is_first:
                seen()
                is_first = False


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    """Return the samples of /metrics, by name and labels as they are written."""
    page = (await http.get("/metrics")).text
    return {name: float(value) for name, value in re.findall(r"^(sagellm:\S+) (\S+)$", page, re.MULTILINE)}


def total(samples: dict[str, float], name: str, label: str = "") -> float:
    """Return the sum of a metric's samples with this label."""
    return sum(
        value for key, value in samples.items() if key.startswith(f"sagellm:{name}{{") and label in key
    )


def prompt(seed: int, length: int) -> list[int]:
    """Return random token ids, the same for the same seed."""
    rng = Random(seed)
    return [rng.randrange(5, 405) for _ in range(length)]


@asynccontextmanager
async def flood(client: Client, options: argparse.Namespace) -> AsyncIterator[None]:
    """Keep 8 urgent streams and 2 requests of 128 continuations running."""
    num_seen = 0

    def seen() -> None:
        nonlocal num_seen
        num_seen += 1

    async def forever(seed: int, **fields: Any) -> None:
        while True:
            seed += 1000
            await client.drain(
                seen, prompt=prompt(seed, options.flood_len), priority=-1000, ignore_eos=True, **fields
            )

    tasks = [asyncio.create_task(forever(seed, max_tokens=options.flood_tokens)) for seed in range(8)]
    await _until(lambda: num_seen >= 8, tasks)
    tasks += [
        asyncio.create_task(forever(seed, max_tokens=options.flood_tokens, n=128, temperature=1.0))
        for seed in (8, 9)
    ]
    await _until(lambda: num_seen >= 10, tasks)
    try:
        yield
    finally:
        failed = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not failed, f"the flood ended: {failed}"


async def _until(condition: Callable[[], bool], tasks: list[asyncio.Task[None]]) -> None:
    end = time.monotonic() + _WAIT_S
    while not condition():
        for task in tasks:
            if task.done():
                task.result()
        if time.monotonic() > end:
            raise RuntimeError("the load did not start")
        await asyncio.sleep(0.02)


async def first_tokens(http: httpx.AsyncClient, options: argparse.Namespace) -> list[float]:
    """Return the other key's times to the first token, in ms, each of another prompt."""
    other, found = Client(http, OTHER), []
    for _ in range(options.requests):
        body = {"prompt": prompt(next(_SEEDS), options.prompt_len), "max_tokens": 4}
        found.append(1e3 * await other.ttft_s(**body))
        await asyncio.sleep(options.pause_s)
    return found


async def beside(
    http: httpx.AsyncClient, options: argparse.Namespace, alone: list[float], num_steps_more: int = 1
) -> dict[str, Any]:
    """Measure the other key's times to the first token beside a load, and compare them with those alone."""
    before, started = await metrics(http), time.perf_counter()
    found = await first_tokens(http, options)
    after, ended = await metrics(http), time.perf_counter()
    num_steps = total(after, "iteration_tokens_total_count") - total(before, "iteration_tokens_total_count")
    step_ms = 1e3 * (ended - started) / num_steps
    alone_ms, beside_ms = spread(alone, 2), spread(found, 2)
    more_ms = num_steps_more * step_ms
    bar_ms = 2 * alone_ms["median"] + more_ms
    return {
        "ttft_alone_ms": alone_ms,
        "ttft_beside_ms": beside_ms,
        "step_ms": round(step_ms, 2),
        "bar_ms": round(bar_ms, 2),
        "num_preemptions": total(after, "num_preemptions_total") - total(before, "num_preemptions_total"),
        "holds_at_p99": beside_ms["p99"] < 2 * alone_ms["p99"] + more_ms,
        "holds": beside_ms["median"] < bar_ms,
    }


async def flooded(http: httpx.AsyncClient, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the other key's time to the first token alone and beside the flood."""
    await first_tokens(http, argparse.Namespace(**{**vars(options), "requests": 5}))
    alone = await first_tokens(http, options)
    async with flood(Client(http, FLOOD), options):
        return await beside(http, options, alone)


def letters(seed: int, length: int) -> str:
    """Return random letters, which no tokenizer shortens much."""
    return "".join(Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=length))


def shapes() -> dict[str, dict[str, Any]]:
    """Return the bodies of jobs that cost much in one place or another."""
    words = [letters(seed, 1024) for seed in range(64)]
    many = [[5 + each % 400] for each in range(500)]
    return {
        "short prompts": {"prompt": many, "max_tokens": 1},
        "bad words × 400 prompts": {"prompt": ["a"] * 400, "bad_words": words, "max_tokens": 1},
        "bad words × 16 prompts": {"prompt": ["a"] * 16, "bad_words": words, "max_tokens": 1},
        "biases": {"prompt": many, "logit_bias": {str(each): 1 for each in range(1024)}, "max_tokens": 1},
        "stop strings": {"prompt": many, "stop": words, "max_tokens": 1},
        "allowed tokens": {"prompt": many, "allowed_token_ids": [*range(5, 405)], "max_tokens": 1},
        "continuations": {"prompt": many[:4], "n": 125, "max_tokens": 1, "temperature": 1.0},
        "scored prompts": {"prompt": [prompt(each, 1500) for each in range(8)], "prompt_logprobs": 20},
    }


async def shaped(http: httpx.AsyncClient, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the other key's time to the first token alone and beside each shape of job."""
    client, found = Client(http, FLOOD), {}
    await first_tokens(http, argparse.Namespace(**{**vars(options), "requests": 5}))
    for name, body in shapes().items():

        async def attack(statuses: Counter[int], body: dict[str, Any] = body) -> None:
            while True:
                status, _, _ = await client.status(**body)
                statuses[status] += 1

        statuses: Counter[int] = Counter()
        alone = await first_tokens(http, options)
        attacking = asyncio.create_task(attack(statuses))
        found[name] = await beside(http, options, alone, num_steps_more=3)
        attacking.cancel()
        found[name]["answers"] = dict(statuses)
        found[name]["holds"] &= not attacking.done()
        await asyncio.gather(attacking, return_exceptions=True)
    return {**found, "holds": all(each["holds"] for each in found.values())}


async def shared(http: httpx.AsyncClient, options: argparse.Namespace) -> dict[str, Any]:
    """Measure how evenly five keys are served for their weights."""

    async def one(client: Client, seed: int) -> None:
        while True:
            seed += 1000
            fields = {"prompt": prompt(seed, 32), "max_tokens": 64, "ignore_eos": True, "temperature": 1.0}
            status, code, _ = await client.status(**fields)
            if status != 200:
                raise RuntimeError(f"{status} {code}")

    tasks = [
        asyncio.create_task(one(Client(http, f"sk-{weight}"), 100 * weight + index))
        for index in range(2 * options.max_num_seqs)  # all keys begin at once: a head start is paid back
        for weight in WEIGHTS
    ]
    await asyncio.sleep(options.window_s / 4)  # until all have a backlog
    before = await metrics(http)
    backlog = []
    for _ in range(10):
        await asyncio.sleep(options.window_s / 10)
        now = await metrics(http)
        backlog.append(min(total(now, "tenant_sequences", f'tenant="w{weight}"') for weight in WEIGHTS))
    after = await metrics(http)
    for task in tasks:
        task.cancel()
    failed = [
        each
        for each in await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(each, RuntimeError)
    ]
    name = "tenant_generation_tokens_total"
    service = {
        weight: total(after, name, f'tenant="w{weight}"') - total(before, name, f'tenant="w{weight}"')
        for weight in WEIGHTS
    }
    index = jains_index(tokens / weight for weight, tokens in service.items())
    return {
        "weights": WEIGHTS,
        "window_s": options.window_s,
        "tokens": list(service.values()),
        "tokens_per_weight": [round(tokens / weight, 1) for weight, tokens in service.items()],
        "least_live_sequences": min(backlog),
        "jains_index": round(index, 4),
        "num_failed": len(failed),
        "holds": index >= LEAST_INDEX and not failed,
    }


async def limited(http: httpx.AsyncClient, _: argparse.Namespace) -> dict[str, Any]:
    """Exceed the quotas of one key, and see how it and another one are answered."""
    small, other = Client(http, "sk-small"), Client(http, OTHER)
    fields: dict[str, Any] = {"prompt": prompt(1, 16), "max_tokens": 64, "ignore_eos": True}
    answers = await asyncio.gather(
        *(small.status(**fields) for _ in range(16)), *(other.status(**fields) for _ in range(16))
    )
    by_requests, of_other = Counter(answers[:16]), Counter(answers[16:])
    answers = await asyncio.gather(
        *(small.status(**{**fields, "max_tokens": 400}) for _ in range(4)),
        *(other.status(**{**fields, "max_tokens": 400}) for _ in range(4)),
    )
    by_tokens = Counter(answers[:4])
    of_other += Counter(answers[4:])
    return {
        "requests": {str(answer): count for answer, count in by_requests.items()},
        "tokens": {str(answer): count for answer, count in by_tokens.items()},
        "other": {str(answer): count for answer, count in of_other.items()},
        "holds": set(by_requests) == {(200, None, None), (429, "tenant_queue_full", "1")}
        and set(by_tokens) == {(200, None, None), (429, "tenant_tokens_full", "1")}
        and set(of_other) == {(200, None, None)},
    }


PARTS = {"flood": flooded, "shares": shared, "shapes": shaped, "quotas": limited}


async def measure(url: str, part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one part."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        return await PARTS[part](http, options)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--port", type=int, default=8767)
    parser.add_argument(
        "--requests", type=int, default=40, help="of the other key, alone and beside the flood"
    )
    parser.add_argument("--pause-s", type=float, default=0.05, help="between two of them")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--flood-len", type=int, default=64)
    parser.add_argument("--flood-tokens", type=int, default=800)
    parser.add_argument("--max-num-seqs", type=int, default=16, help="in the part with five keys")
    parser.add_argument("--window-s", type=float, default=20.0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--flags", default="", help="more flags of the server, separated by spaces")
    options = parser.parse_args()
    others = foreign_cores()
    lines = [
        f"{FLOOD} name=flood",
        f"{OTHER} name=other",
        "sk-small name=small max_requests=4 max_tokens=1000",
    ]
    lines += [f"sk-{weight} name=w{weight} weight={weight}" for weight in WEIGHTS]
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("\n".join(lines))
        keys.chmod(0o600)
        flags = [
            f"--api-key-file={keys}",
            "--metrics-allow=127.0.0.1",
            "--no-access-log",
            *options.flags.split(),
        ]
        found: dict[str, Any] = {}
        for part in options.parts:
            own = [f"--max-num-seqs={options.max_num_seqs}"] if part == "shares" else []
            with served(options.model, options.port, *flags, *own) as engine:
                found[part] = asyncio.run(measure(engine.url, part, options))
    report("tenants", foreign_cores=others, settings=vars(options), **found)
    failed = [name for name, part in found.items() if not part["holds"]]
    if failed:
        sys.exit(f"these bars do not hold: {', '.join(failed)}")


if __name__ == "__main__":
    main()
