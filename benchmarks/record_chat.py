"""Records traffic of the embedded model, with text: `python benchmarks/record_chat.py`.

Serves the embedded model with `--record --record-text` and sends it, over HTTP and as a Poisson process:

    chat        conversations whose questions are drawn as the model's training text is, by five tenants that
                each ask mostly for one kind of thing, with temperatures from 0.7 to 1 and a seed each; some
                conversations go on, with the answers that the model really gave
    templates   five prompts whose fillings decide how long the greedy answer becomes

Kept as benchmarks/traces/embedded_chat.jsonl.xz and embedded_templates.jsonl.xz. Printed: how many requests
ended by themselves, how long the answers are, and how much lengths vary within each template.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import httpx
from common import describe_machine
from served import served

from sagellm.core import TraceRequest
from sagellm.engines.embedded import EMBEDDED
from sagellm.lab.traces import read_trace, write_trace

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "engines/embedded_model"))

from corpus import arithmetic, chats, json_answers, lists, stories, text_tasks  # noqa: E402
from corpus.mixture import Generator  # noqa: E402
from corpus.questions import Questions, read_facts  # noqa: E402
from corpus.sample import Dialogue  # noqa: E402
from corpus.tables.categories import MEMBERS  # noqa: E402
from corpus.wording import NUMBERS  # noqa: E402

TRACES = ROOT / "benchmarks/traces"
FILES = {"chat": "embedded_chat.jsonl.xz", "templates": "embedded_templates.jsonl.xz"}
FLAGS = ("--num-blocks=4096", "--max-num-seqs=32", "--max-queued-requests=4096")
THINK_S = 0.5
MAX_TOKENS = 320

Ask = Callable[[str, list[dict[str, str]], dict[str, Any]], Awaitable[str]]
"""Asks as a tenant, given messages and parameters; returns the answer."""


def tenants() -> dict[str, tuple[float, list[tuple[Generator, float]]]]:
    """Return each tenant's share of the conversations, and what it asks for with which weights."""
    questions = Questions(read_facts()).make
    return {
        "helpdesk": (0.4, [(questions, 0.9), (chats.make, 0.1)]),
        "writers": (0.15, [(stories.make, 0.8), (lists.make, 0.2)]),
        "planners": (0.15, [(lists.make, 0.7), (json_answers.make, 0.3)]),
        "students": (0.15, [(arithmetic.make, 0.6), (text_tasks.make, 0.2), (questions, 0.2)]),
        "home": (0.15, [(chats.make, 0.7), (stories.make, 0.1), (questions, 0.2)]),
    }


def drawn(rng: random.Random) -> Iterator[tuple[str, Dialogue]]:
    """Yield tenants and dialogues, of which the users' turns are sent."""
    everyone = tenants()
    shares = [share for share, _ in everyone.values()]
    while True:
        name = rng.choices(list(everyone), shares)[0]
        generators, weights = zip(*everyone[name][1], strict=True)
        generator: Generator = rng.choices(generators, weights)[0]
        sample = generator(rng)
        if isinstance(sample, Dialogue) and not sample.tools:
            yield name, sample


async def converse(ask: Ask, name: str, dialogue: Dialogue, rng: random.Random) -> int:
    """Send a dialogue turn by turn, with the answers that come; return the number of requests."""
    messages: list[dict[str, str]] = []
    num_requests = 0
    temperature = round(rng.uniform(0.7, 1.0), 2)
    for message in dialogue.messages:
        if message.role == "assistant":
            continue
        if num_requests:
            await asyncio.sleep(rng.expovariate(1 / THINK_S))
        messages.append({"role": message.role, "content": message.content})
        if message.role == "user":
            params = {"temperature": temperature, "seed": rng.getrandbits(31), "max_tokens": MAX_TOKENS}
            messages.append({"role": "assistant", "content": await ask(name, messages, params)})
            num_requests += 1
    return num_requests


async def send_chats(ask: Ask, num_requests: int, rate: float, seed: int) -> None:
    """Begin conversations as a Poisson process until there are so many requests."""
    rng = random.Random(seed)
    conversations = []
    num_planned = 0
    for name, dialogue in drawn(rng):
        num_planned += sum(message.role == "user" for message in dialogue.messages)
        turns = random.Random(rng.getrandbits(64))
        conversations.append(asyncio.create_task(converse(ask, name, dialogue, turns)))
        if num_planned >= num_requests:
            break
        await asyncio.sleep(rng.expovariate(rate))
    await asyncio.gather(*conversations)


async def chat_with_server(port: int, num_requests: int, rate: float) -> None:
    """Send conversations to a server of this machine, always the same ones, all as one tenant."""
    limits = httpx.Limits(max_connections=256)
    base_url = f"http://127.0.0.1:{port}/v1"
    async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=120) as client:

        async def ask(name: str, messages: list[dict[str, str]], params: dict[str, Any]) -> str:
            answer = await client.post("/chat/completions", json={"messages": messages, **params})
            answer.raise_for_status()
            text: str = answer.json()["choices"][0]["message"]["content"] or ""
            return text

        await send_chats(ask, num_requests, rate, seed=3)


def templates() -> dict[str, Callable[[random.Random], str]]:
    """Return what fills each template; the fillings come back."""
    kinds = [kind.many for kind, members in MEMBERS.items() if len(members) >= 12]
    words = sorted({word for members in MEMBERS.values() for word in members if word.isalpha()})[::4]
    return {
        "list": lambda rng: f"List {rng.randint(3, 8)} {rng.choice(kinds)}.",
        "bullets": lambda rng: (
            f"Give me a list of {NUMBERS[rng.randint(3, 10)]} {rng.choice(kinds)} as bullet points."
        ),
        "shopping": lambda rng: f"Write a shopping list with {rng.randint(3, 9)} things.",
        "count": lambda rng: f"Count to {NUMBERS[rng.choice((5, 6, 7, 8, 9, 10, 11, 12, 15))]}.",
        "spell": lambda rng: f"Spell the word {rng.choice(words)}.",
    }


async def send_templates(ask: Ask, num_requests: int, rate: float, seed: int) -> None:
    """Send filled templates in random order, each by its own tenant."""
    rng, filling = random.Random(seed), templates()
    requests = []
    for _ in range(num_requests):
        name = rng.choice(list(filling))
        messages = [{"role": "user", "content": filling[name](rng)}]
        requests.append(
            asyncio.create_task(ask(name, messages, {"temperature": 0, "max_tokens": MAX_TOKENS}))
        )
        await asyncio.sleep(rng.expovariate(rate))
    await asyncio.gather(*requests)


def record(kind: str, options: argparse.Namespace) -> list[TraceRequest]:
    """Serve, send, and return what was recorded."""
    names = list(tenants() if kind == "chat" else templates())
    keys = {name: f"record-{name}-key" for name in names}
    num_sent = count()

    async def send() -> None:
        limits = httpx.Limits(max_connections=256)
        base_url = f"http://127.0.0.1:{options.port}/v1"
        async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=120) as client:

            async def ask(name: str, messages: list[dict[str, str]], params: dict[str, Any]) -> str:
                next(num_sent)
                headers = {"Authorization": f"Bearer {keys[name]}"}
                body = {"messages": messages, **params}
                answer = await client.post("/chat/completions", json=body, headers=headers)
                answer.raise_for_status()
                text: str = answer.json()["choices"][0]["message"]["content"] or ""
                return text

            sender = send_chats if kind == "chat" else send_templates
            num_requests = options.num_chats if kind == "chat" else options.num_templates
            await sender(ask, num_requests, options.rate, options.seed)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traffic.jsonl"
        flags = (f"--api-key={key} name={name}" for name, key in keys.items())
        with served(EMBEDDED, options.port, f"--record={path}", "--record-text", *FLAGS, *flags):
            asyncio.run(send())
        found = read_trace(path)
    assert len(found) == next(num_sent), "every request is recorded"
    return found


def summary(kind: str, requests: list[TraceRequest]) -> dict[str, Any]:
    """Return counts, and how much lengths vary: within each tenant, which has a template to itself."""
    by_tenant: dict[str, list[int]] = {}
    for one in requests:
        by_tenant.setdefault(one.tenant, []).append(one.num_output_tokens)
    return {
        "trace": FILES[kind],
        "num_requests": len(requests),
        "num_later_turns": sum((one.turn or 1) > 1 for one in requests),
        "ended_by_itself": round(fmean(one.finish_reason == "stop" for one in requests), 3),
        "mean_prompt_tokens": round(fmean(one.num_prompt_tokens for one in requests), 1),
        "mean_output_tokens": round(fmean(one.num_output_tokens for one in requests), 1),
        "variation": {
            name: round(pstdev(lengths) / fmean(lengths), 2) for name, lengths in sorted(by_tenant.items())
        },
    }


def main() -> None:
    """Record both traces."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-chats", type=int, default=4000, help="requests; default: %(default)s")
    parser.add_argument("--num-templates", type=int, default=2000, help="requests; default: %(default)s")
    parser.add_argument("--rate", type=float, default=25, help="arrivals per second; default: %(default)s")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--port", type=int, default=8768)
    parser.add_argument("--folder", type=Path, default=TRACES, help="default: %(default)s")
    options = parser.parse_args()
    about = {
        "made_by": "python benchmarks/record_chat.py",
        "licence": "Apache-2.0",
        "cpu": describe_machine()["cpu"],
    }
    for kind, name in FILES.items():
        requests = record(kind, options)
        kept = [
            replace(
                one, arrival_s=round(one.arrival_s, 4), ttft_s=_short(one.ttft_s), total_s=_short(one.total_s)
            )
            for one in requests
        ]
        write_trace(options.folder / name, kept, about)
        size = (options.folder / name).stat().st_size
        print(json.dumps({**summary(kind, requests), "bytes": size}, indent=1))


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


if __name__ == "__main__":
    main()
