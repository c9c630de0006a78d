"""Our passes and eviction policies in vLLM: `python benchmarks/vllm_adapter.py --vllm-python P`.

P is an interpreter with vLLM 0.32 for CPUs, `sagellm-adapters` and `sagellm-eviction-policy`
(docs/adapters.md).

    outputs     256 greedy requests with KV for a few of them, so that many are preempted; float32. Under
                vLLM's order, ours has to say the same and preempt as often; the second pair is AsyncScheduler
    order       the same requests at once under `order=shortest`: who is admitted when, beside their lengths
    step        `schedule` with N running, step by step in turns: all decode, the same with a full queue, and
                with requests that end and others that take their place
    throughput  output tokens per second with 80 clients for 64 seats, step by step in turns: whole runs
                differ by a third. With a model of two layers, and with one of the
                Qwen3-0.6B shape in bf16; 95 % interval of the ratio over pairs, each with loads of its own
    eviction    the hit rate of vLLM's offloading manager on a trace of Mooncake's, in chunks of 512 tokens

Each part that runs replaces its own figures in the kept file.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from common import Measure, output_flags, publish_parts, ratio_of_pairs, spread
from make_model import ensure
from peer import Conversation, Peer

from sagellm.engines.testing import make_checkpoint

PASSES = "order=shortest,share=fair-share,chunk=chunked-prefill"
"""The passes of our engine's default."""

NUM_REQUESTS, NUM_CLIENTS, FEW_BLOCKS, MANY_BLOCKS = 256, 80, 64, 2048
THROUGHPUT = {"2-layers": (400, 2, MANY_BLOCKS), "0.6B": (160, 1, 512)}
"""By model: requests of a race, races of a pair, blocks."""

PARTS = ("outputs", "order", "step", *(f"throughput-{model}" for model in THROUGHPUT), "eviction")

POLICIES = ("lru", "arc", "sagellm-eviction-policy:lru", "s3fifo", "reuse")
CAPACITIES = (1000, 5000, 10_000, 50_000)
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", required=True, metavar="P")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--trace", type=Path, help="of Mooncake's format, for `eviction`")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    output_flags(parser, "vllm-adapter-amx-2core")
    options = parser.parse_args()
    measures: dict[str, Measure] = {
        "outputs": outputs,
        "order": order,
        "step": step_times,
        **{f"throughput-{model}": partial(throughput, model=model) for model in THROUGHPUT},
        "eviction": eviction,
    }
    publish_parts("vllm_adapter", measures, options.part, _text, options)


def _vllm(options: argparse.Namespace) -> Conversation:
    peer = Conversation(Peer("vllm", options.vllm_python, ""), "passes")
    print("vLLM", peer.hear()["version"], flush=True)
    return peer


def _small(folder: str) -> Path:
    model = Path(folder) / "model"
    if not model.exists():
        make_checkpoint(model, family="qwen3", seed=0, dtype="float32", **MODEL)
    return model


def _loaded(
    options: argparse.Namespace, model: Path, *, is_async: bool, num_blocks: int = MANY_BLOCKS
) -> Conversation:
    peer = _vllm(options)
    overlaps = peer.ask("load", str(model), is_async, options.threads, num_blocks)["overlaps"]
    print(f"AsyncScheduler: {is_async}, and steps overlap: {overlaps}", flush=True)
    return peer


def _requests(number: int, seed: int = 1) -> list[list[int]]:
    """Return requests: seed, tokens of the prompt, tokens of the output."""
    rng = random.Random(seed)
    return [[index, rng.randrange(4, 200), rng.randrange(4, 64)] for index in range(number)]


def outputs(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the outputs under vLLM's order, with and without overlapped steps."""
    rows = []
    for is_async in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            peer = _loaded(options, _small(folder), is_async=is_async)
            asked = _requests(NUM_REQUESTS)
            both = [peer.ask("run", passes, asked, FEW_BLOCKS) for passes in (None, "null")]
            peer.end()
        rows.append(
            {
                "async": is_async,
                "schedulers": [each["scheduler"] for each in both],
                "preemptions": [each["preemptions"] for each in both],
                "equal_outputs": both[0]["digest"] == both[1]["digest"],
                "equal_admission": both[0]["admitted"] == both[1]["admitted"],
                "output_tokens": both[0]["output_tokens"],
            }
        )
    return {"requests": NUM_REQUESTS, "blocks": FEW_BLOCKS, "block_size": 32, "rows": rows}


def order(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the order of admission with that of the lengths."""
    with tempfile.TemporaryDirectory() as folder:
        peer = _loaded(options, _small(folder), is_async=False)
        asked = _requests(NUM_REQUESTS)
        shortest = peer.ask("run", "order=shortest", asked, FEW_BLOCKS)
        stock = peer.ask("run", None, asked, FEW_BLOCKS)
        peer.end()
    lengths = [asked[index][1] for index in shortest["admitted"]]
    expected = sorted(range(len(asked)), key=lambda index: asked[index][1])
    return {
        "requests": len(asked),
        "as_expected": shortest["admitted"] == expected,
        "in_order_of_length": lengths == sorted(lengths),
        "stock_in_order_of_arrival": stock["admitted"] == list(range(len(asked))),
        "equal_outputs": shortest["digest"] == stock["digest"],
        "preemptions": [stock["preemptions"], shortest["preemptions"]],
        "failures": shortest["failures"],
    }


def step_times(options: argparse.Namespace) -> dict[str, Any]:
    """Time `schedule` in both."""
    peer = _vllm(options)
    rows = []
    for running, (load, waiting, ends_after) in product(
        (8, 32, 128, 256), (("decode", 0, 10_000), ("full queue", 1, 10_000), ("churn", 1, 64))
    ):
        took = peer.ask("steps", PASSES, running, waiting * running, ends_after, options.steps)
        row: dict[str, Any] = {"running": running, "load": load}
        for place, clock in enumerate(("", "cpu_")):
            both = {name: [each[place] for each in values] for name, values in took.items()}
            row |= {f"{clock}{name}_us": spread(values, 1) for name, values in both.items()}
            row[f"{clock}ratio"] = median(both["ours"]) / median(both["stock"])
            row[f"{clock}mean_ratio"] = fmean(both["ours"]) / fmean(both["stock"])
        rows.append(row)
    peer.end()
    return {"passes": PASSES, "rows": rows}


def throughput(options: argparse.Namespace, *, model: str) -> dict[str, Any]:
    """Run pairs of the same load with a model."""
    with tempfile.TemporaryDirectory() as folder:
        path = _small(folder) if model == "2-layers" else ensure(Path(folder) / "0.6b")
        return _races(options, path, *THROUGHPUT[model])


def _races(
    options: argparse.Namespace, model: Path, num_requests: int, num_races: int, num_blocks: int
) -> dict[str, Any]:
    """Run pairs, each of so many races with loads of their own; both take the first step in turns."""
    peer = _loaded(options, model, is_async=False, num_blocks=num_blocks)
    peer.ask("load", str(model), False, options.threads, num_blocks)
    peer.ask("race", PASSES, _requests(num_requests), NUM_CLIENTS, num_blocks)  # warm up
    rates: dict[str, list[float]] = {name: [] for name in ("stock", "ours", "cpu_stock", "cpu_ours")}
    seeds, steps = count(), {"stock": 0, "ours": 0}
    for _ in range(options.pairs):
        races = [
            peer.ask("race", PASSES, _requests(num_requests, next(seeds)), NUM_CLIENTS, num_blocks)
            for _ in range(num_races)
        ]
        for name in steps:
            steps[name] += sum(each["steps"][name] for each in races)
            num_tokens = sum(each["output_tokens"][name] for each in races)
            rates[name].append(num_tokens / sum(each["seconds"][name] for each in races))
            rates[f"cpu_{name}"].append(num_tokens / sum(each["cpu_seconds"][name] for each in races))
    peer.end()
    return {
        "passes": PASSES,
        "requests": num_requests,
        "clients": NUM_CLIENTS,
        "pairs": options.pairs,
        "races": num_races,
        "steps": steps,
        **ratio_of_pairs(rates["ours"], rates["stock"]),
        "of_cpu": ratio_of_pairs(rates["cpu_ours"], rates["cpu_stock"]),
        "output_tokens_per_s": rates,
    }


def eviction(options: argparse.Namespace) -> dict[str, Any]:
    """Replay the trace under each policy."""
    if options.trace is None:
        raise SystemExit("eviction needs --trace, a trace of Mooncake's format")
    peer = _vllm(options)
    rows = []
    for capacity, policy in product(CAPACITIES, POLICIES):
        ran = peer.ask("replay", str(options.trace.resolve()), policy, capacity)
        rows.append({"capacity": capacity, "policy": policy, "is_stock": policy in ("lru", "arc"), **ran})
    peer.end()
    return {"trace": options.trace.name, "chunk_tokens": 512, "rows": rows}


def _outputs_text(found: dict[str, Any]) -> str:
    return "\n".join(
        f"outputs of {found['requests']} requests, {'AsyncScheduler' if row['async'] else 'Scheduler'}: "
        f"{'equal' if row['equal_outputs'] else 'NOT EQUAL'}; preemptions {row['preemptions']}"
        for row in found["rows"]
    )


def _order_text(found: dict[str, Any]) -> str:
    told = "as expected" if found["as_expected"] else "NOT as expected"
    return f"shortest first: {told}; outputs {'equal' if found['equal_outputs'] else 'differ'}"


def _step_text(found: dict[str, Any]) -> str:
    head = (
        f"{'RUNNING':>8}  {'LOAD':12}{'STOCK':>10}{'P99':>10}{'OURS':>10}{'P99':>10}{'RATIO':>8}"
        f"{'OF CPU':>8}{'MEANS':>8}  µs"
    )
    rows = (
        f"{row['running']:>8}  {row['load']:12}{row['stock_us']['median']:>10}{row['stock_us']['p99']:>10}"
        f"{row['ours_us']['median']:>10}{row['ours_us']['p99']:>10}{row['ratio']:>8.2f}"
        f"{row['cpu_ratio']:>8.2f}{row['cpu_mean_ratio']:>8.2f}"
        for row in found["rows"]
    )
    return "\n".join((head, *rows))


def _throughput_text(found: dict[str, Any], *, model: str) -> str:
    low, high = found["interval_95"]
    return (
        f"throughput, {model}, ours ÷ stock: {found['ratio']:.3f} (95 %: {low:.3f} to {high:.3f}) "
        f"of {found['pairs']} pairs; of CPU time {found['of_cpu']['ratio']:.3f}"
    )


def _eviction_text(found: dict[str, Any]) -> str:
    rates = {(row["policy"], row["capacity"]): row["hit_rate"] for row in found["rows"]}
    head = f"{'POLICY':30}" + "".join(f"{capacity:>10,}" for capacity in CAPACITIES)
    rows = (
        f"{policy:30}" + "".join(f"{rates[policy, capacity]:>10.2%}" for capacity in CAPACITIES)
        for policy in POLICIES
    )
    return "\n".join((head, *rows))


_TEXTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "outputs": _outputs_text,
    "order": _order_text,
    "step": _step_text,
    **{f"throughput-{model}": partial(_throughput_text, model=model) for model in THROUGHPUT},
    "eviction": _eviction_text,
}


def _text(found: dict[str, Any]) -> str:
    return "\n\n".join(_TEXTS[name](part) for name, part in found.items())


if __name__ == "__main__":
    main()
