"""Policies that change while a server serves, and shadows: `python benchmarks/live_policies.py [TRACE]`.

    switches   100 greedy streams over HTTP, twice; the second time each kind of policy is switched ten times
               while they run. Printed: how many answers are equal, and how long switches took
    guard      a switch that breaks its limit: the time from the request that breaks it to the switch back
    shadows    conversations with the embedded model, recorded, with shadow caches from the start. Printed:
               what each shadow says was saved, and what a replay of the recording saves with that policy
    cost       throughput with shadows ÷ without, in pairs of rounds in changing order
    samples    TRACE in 100 windows: how often the 95 % interval of a sampled shadow has the replayed value

Each part that runs replaces its own figures in the kept file.
TRACE is Mooncake's conversation trace (benchmarks/traces/README.md); without it, `samples` is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from common import Measure, output_flags, publish_parts, ratio_of_pairs, spread
from make_model import ensure
from record_chat import MAX_TOKENS, chat_with_server
from served import served

from sagellm.core import Namespace, PluginRegistry, ProviderSpec, VirtualClock
from sagellm.engines.config import EngineConfig
from sagellm.engines.embedded import EMBEDDED
from sagellm.engines.engine_core.kv_modules import build_kv
from sagellm.engines.engine_core.seats import Seats
from sagellm.engines.engine_core.shadows import Served, ShadowCaches
from sagellm.engines.modules import Modules
from sagellm.lab.bench import Lengths, LoadSettings, run_serve
from sagellm.lab.simulation.bounds import replay
from sagellm.lab.simulation.prompts import kept_tokens
from sagellm.lab.traces import read_trace
from sagellm.server.remote.admin_client import AdminClient

SWITCHES = {
    "eviction": ("s3fifo", "lru", "arc", "lfu", "reuse"),
    "passes": ("order=none", "order=priority,share=none", "order=mlfq", "order=shortest,share=fair-share"),
    "predictor": ("null", "statistical"),
    "drafts": ("ngram", "none", "suffix"),
}
NUM_STREAMS, NUM_SWITCHES, NUM_WINDOWS = 100, 10, 100
WORDS = ("river", "stone", "lamp", "cloud", "paper", "chair", "glass", "honey", "winter", "market")


async def streams(client: httpx.AsyncClient) -> list[str]:
    """Stream 100 greedy completions at once; return what each says."""

    async def stream(number: int) -> str:
        prompt = (
            " ".join(WORDS[: 3 + number % 5] + WORDS[number % 10 : number % 10 + 1] * (1 + number % 7))
            + f" {number}"
        )
        body = {"model": "embedded", "prompt": prompt, "max_tokens": 160, "temperature": 0, "stream": True}
        choices: list[dict[str, Any]] = []
        async with client.stream("POST", "/completions", json={**body, "ignore_eos": True}) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choices += json.loads(line[6:])["choices"]
        assert choices[-1]["finish_reason"] == "length", f"stream {number} ended with {choices[-1]}"
        return "".join(choice["text"] for choice in choices)

    return await asyncio.gather(*(stream(number) for number in range(NUM_STREAMS)))


def switches(options: argparse.Namespace) -> dict[str, Any]:
    """Stream with and without switches."""
    flags = ("--num-blocks=600", "--max-num-seqs=48", "--deterministic")
    took_ms: list[float] = []
    base_url = f"http://127.0.0.1:{options.port}/v1"
    with served(EMBEDDED, options.port, *flags) as engine, AdminClient.connect(engine.socket) as admin:

        async def run(*, with_switches: bool) -> tuple[list[str], int]:
            limits = httpx.Limits(max_connections=NUM_STREAMS)
            async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=300) as client:
                answers = asyncio.create_task(streams(client))
                num_live = 0
                for number in range(NUM_SWITCHES if with_switches else 0):
                    for kind, names in SWITCHES.items():
                        await asyncio.sleep(0.02)
                        name = names[number % len(names)]
                        found = await asyncio.to_thread(admin.call, "policy_set", kind=kind, name=name)
                        took_ms.append(found["changes"][-1]["took_ns"] / 1e6)
                        num_live += not answers.done()
                return await answers, num_live

        expected, _ = asyncio.run(run(with_switches=False))
        admin.call("cache_clear")
        given, num_live = asyncio.run(run(with_switches=True))
        admin.call("check")
    return {
        "num_streams": NUM_STREAMS,
        "num_equal": sum(one == other for one, other in zip(expected, given, strict=True)),
        "num_switches": len(took_ms),
        "num_switches_while_streaming": num_live,
        "switch_ms": spread(took_ms, 2),
    }


def guard(options: argparse.Namespace) -> dict[str, Any]:
    """Break a guard's limit five times; return the seconds until the switch back."""
    took_s: list[float] = []
    base_url = f"http://127.0.0.1:{options.port}/v1"
    with (
        served(EMBEDDED, options.port) as engine,
        AdminClient.connect(engine.socket) as admin,
        httpx.Client(base_url=base_url, timeout=60) as client,
    ):
        for number in range(5):
            admin.call("policy_set", kind="eviction", name="lru", guards=["hit_rate>=0.9"], min_requests=20)
            for each in range(20):  # the twentieth breaks it: none has a prompt like another
                body = {"model": "embedded", "prompt": f"{number} {each} {WORDS}", "max_tokens": 2}
                client.post("/completions", json=body).raise_for_status()
            broken = time.perf_counter()
            while True:
                change = admin.call("policies")["changes"][-1]
                if change["made_by"] == "guard":
                    break
                assert time.perf_counter() - broken < 10, "the guard does not trip"
                time.sleep(0.005)
            took_s.append(time.perf_counter() - broken)
    return {"why": change["why"], "back_to": change["after"], "seconds_to_revert": spread(took_s, 3)}


def shadows(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Record conversations beside shadows; compare these with replays."""
    path, policies = Path(folder) / "chats.jsonl", options.policies
    flags = (f"--num-blocks={options.num_blocks}", "--max-num-seqs=4", f"--record={path}")

    shadow = f"--shadow={','.join(policies)}"
    with (
        served(EMBEDDED, options.port, f"--max-model-len={4 * MAX_TOKENS}", shadow, *flags) as engine,
        AdminClient.connect(engine.socket) as admin,
    ):
        asyncio.run(chat_with_server(options.port, options.num_chats, options.rate))
        time.sleep(1)
        found = admin.call("policies")["shadows"]
    requests = read_trace(path)
    rows = {}
    for each in found["shadows"]:
        config = EngineConfig.from_flat(
            num_blocks=options.num_blocks,
            block_size=requests[0].block_tokens,
            eviction_policy=each["policy"],
        )
        done = replay(requests, config, lambda amount: None)
        replayed = sum(one.num_saved_tokens for one in done) / sum(one.num_prompt_tokens for one in done)
        rows[each["policy"]] = {
            "shadow": round(each["hit_rate"], 5),
            "replayed": round(replayed, 5),
            "difference_points": round(100 * (each["hit_rate"] - replayed), 3),
        }
    return {
        "num_requests": found["num_requests"],
        "num_recorded": len(requests),
        "live": round(found["hit_rate"], 5),
        "us_per_request_and_shadow": round(1e6 * found["seconds"] / found["num_requests"] / len(rows), 1),
        "policies": rows,
    }


def cost(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Measure pairs of rounds with and without shadows, with the embedded model and one of 0.6B."""
    large = options.model or ensure(Path(folder) / "0.6b", sharpness=0.2)
    rounds = {"embedded": (EMBEDDED, options.num_prompts), "0.6B": (str(large), options.num_prompts // 8)}
    return {name: _cost_of(model, num_prompts, options) for name, (model, num_prompts) in rounds.items()}


def _cost_of(model: str, num_prompts: int, options: argparse.Namespace) -> dict[str, Any]:
    requests_per_s: dict[bool, list[float]] = {False: [], True: []}
    shares: list[float] = []
    flags = ("--num-blocks=4096", "--max-queued-requests=4096")
    with served(model, options.port, *flags) as engine, AdminClient.connect(engine.socket) as admin:
        settings = LoadSettings(
            base_url=f"http://127.0.0.1:{options.port}/v1",
            num_prompts=num_prompts,
            input_len=Lengths.parse(str(options.prompt)),
            output_len=Lengths.parse(str(options.tokens)),
            concurrency=32,
            vocab_size=500,
            warmup=0,
        )
        run_serve(settings)
        for number in range(options.rounds):
            for is_on in (False, True) if number % 2 else (True, False):
                admin.call("policy_shadow", names=",".join(options.policies[:2]) if is_on else "off")
                figures = run_serve(settings).figures
                assert figures.num_failed == 0, figures.errors
                requests_per_s[is_on].append(num_prompts / figures.duration_s)
                if is_on:
                    found = admin.call("policies")["shadows"]
                    assert found["num_requests"] >= num_prompts - settings.concurrency, found
                    shares.append(found["seconds"] / figures.duration_s)
    return {
        "num_shadows": 2,
        "num_prompts": num_prompts,
        "requests_per_s": {
            "with shadows" if on else "without": spread(values, 1) for on, values in requests_per_s.items()
        },
        "share_of_time": spread(shares),
        **ratio_of_pairs(requests_per_s[True], requests_per_s[False]),
    }


def samples(options: argparse.Namespace) -> dict[str, Any]:
    """Let sampled shadows estimate each of 100 windows of a trace that a whole shadow replays."""
    requests = read_trace(options.trace, limit=options.limit)
    found: dict[str, Any] = {}
    for capacity, sample in itertools.product(options.capacities, options.samples):
        config = EngineConfig.from_flat(num_blocks=capacity, block_size=requests[0].block_tokens)
        modules, specs = Modules(PluginRegistry.load(), config), [*map(ProviderSpec.of, options.policies)]
        kv = build_kv(modules, Seats(1, block_size=config.kv.block_size), capacity, VirtualClock()).manager
        whole = ShadowCaches(modules, specs, kv)
        part = ShadowCaches(modules, specs, kv, sample=sample)
        marks = [(whole.total(), part.total())]
        for number, one in enumerate(requests):
            namespace, arrival_ns = Namespace(one.tenant or "default"), round(one.arrival_s * 1e9)
            asked = Served(kept_tokens(one), one.num_prompt_tokens, 0, namespace, 0, arrival_ns)
            before = whole.total()
            whole.take(asked)
            own = int((whole.total().differences - before.differences)[0, 0])
            part.take(asked._replace(num_cached_tokens=own))  # as if the first policy served
            if (number + 1) % (len(requests) // NUM_WINDOWS) == 0:
                marks.append((whole.total(), part.total()))
        for place, name in enumerate(options.policies):
            inside, widths = 0, []
            for before, after in itertools.pairwise(marks):
                true = whole.rates(before[0], after[0])[place].value
                rate = part.rates(before[1], after[1])[place]
                low, high = rate.low or 0.0, rate.high or 0.0
                inside += low <= true <= high
                widths.append(100 * (high - low) / 2)
            estimate = part.rates(marks[0][1], marks[-1][1])[place]
            found[f"{name}, {capacity} blocks, {sample:g} sampled"] = {
                "num_windows": len(marks) - 1,
                "num_covered": inside,
                "half_width_points": round(fmean(widths), 2),
                "replayed": round(whole.rates(marks[0][0], marks[-1][0])[place].value, 4),
                "estimate": [round(each, 4) for each in estimate if each is not None],
            }
    return found


PARTS = ("switches", "guard", "shadows", "cost", "samples")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--model", type=Path, help="of the 0.6B shape, for `cost`; default: made for it, of random weights"
    )
    parser.add_argument("--policies", nargs="+", default=["lru", "s3fifo", "arc", "reuse"])
    parser.add_argument("--rounds", type=int, default=30, help="pairs; default: %(default)s")
    parser.add_argument(
        "--num-prompts", type=int, default=512, help="in a round; an eighth for 0.6B; default: %(default)s"
    )
    parser.add_argument("--prompt", type=int, default=64, help="tokens; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=32, help="to generate; default: %(default)s")
    parser.add_argument("--num-chats", type=int, default=1000, help="requests; default: %(default)s")
    parser.add_argument("--rate", type=float, default=16, help="chats per second; default: %(default)s")
    parser.add_argument(
        "--num-blocks", type=int, default=600, help="of the chats' cache; default: %(default)s"
    )
    parser.add_argument("--capacities", nargs="+", type=int, default=[5000, 10000], help="of `samples`")
    parser.add_argument("--samples", nargs="+", type=float, default=[0.1, 0.25], help="of `samples`")
    parser.add_argument("--limit", type=int, default=12_000, help="requests of TRACE; default: %(default)s")
    parser.add_argument("--port", type=int, default=8771)
    output_flags(parser, "live-policies")
    options = parser.parse_args()
    chosen = [name for name in options.parts if name != "samples" or options.trace is not None]
    with tempfile.TemporaryDirectory() as folder:
        measures: dict[str, Measure] = {
            "switches": switches,
            "guard": guard,
            "shadows": partial(shadows, folder=folder),
            "cost": partial(cost, folder=folder),
            "samples": samples,
        }
        publish_parts("live-policies", measures, chosen, lambda found: json.dumps(found, indent=1), options)


if __name__ == "__main__":
    main()
