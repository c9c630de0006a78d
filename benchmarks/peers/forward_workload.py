"""The measurements that every engine's runner makes; imports nothing but the standard library.

A runner calls `run` with a function that loads its engine. Times are of `time.perf_counter`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

STARTED_S = time.perf_counter()
_FIRST_ID, _LAST_ID = 3, 500  # ids that every copy of the vocabulary has
_MOST_S = 60


class Engine(Protocol):
    """What a runner offers: one request with the time of each token, and many at once."""

    about: dict[str, Any]

    def rest(self) -> None:
        """Do what the engine does while it has no requests."""

    def one(self, prompt: list[int], num_output: int) -> list[float]:
        """Run a request alone; return the seconds from its start to each of its tokens."""

    def many(self, prompts: list[list[int]], num_output: int) -> int:
        """Run requests at once, each to its full length; return the number of output tokens."""


def read_order() -> dict[str, Any]:
    """Return what `forward_peers.py` asks of a runner."""
    return dict(json.loads(sys.argv[1]))


def run(
    load: Callable[[dict[str, Any]], Engine], write: Callable[[Path, Path, str], None] | None = None
) -> None:
    """Load the engine, measure, and print one line of JSON; what the engine prints goes to the errors.

    An order with a target is for `write`, which makes a copy of the model there in a format.
    """
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    order = read_order()
    if order.get("target"):
        assert write is not None, "asked of runners that write copies"
        write(Path(order["model"]), Path(order["target"]), order["format"])
        return
    engine = load(order)
    load_s = time.perf_counter() - STARTED_S
    engine.one(_prompt("first", 16), 1)
    figures: dict[str, Any] = {"start_s": _process_age_s(), "load_s": load_s}
    for name in order["phases"] or [name for name in PHASES if name != "memory"]:
        figures |= PHASES[name](engine, order["rounds"])
    figures["peak_rss_mib"] = peak_rss_mib()
    print(json.dumps({"figures": figures, "about": engine.about}), file=channel, flush=True)
    os._exit(0)  # without the complaints of threads that are taken down


def _repeat(engine: Engine, rounds: int) -> Iterator[int]:
    """Count rounds, each behind a rest, until they have taken a minute."""
    started = time.perf_counter()
    for number in range(rounds):
        if time.perf_counter() - started > _MOST_S:
            return
        engine.rest()
        yield number


def _decode(engine: Engine, rounds: int, prompt: int = 128, output: int = 128) -> list[float]:
    engine.one(_prompt(f"warm decode {prompt}", prompt), 8)
    rates = []
    for number in _repeat(engine, rounds):
        times = engine.one(_prompt(f"decode {prompt} {number}", prompt), output)
        assert len(times) == output, f"{len(times)} tokens of {output}"
        rates.append((output - 1) / (times[-1] - times[0]))
    return rates


def decode(engine: Engine, rounds: int) -> dict[str, Any]:
    """Return tokens/s of one request between its first and its last token."""
    return {"decode_tokens_per_s": spread(_decode(engine, rounds))}


def decode_256(engine: Engine, rounds: int) -> dict[str, Any]:
    """Return the same at a context of 192 to 320 tokens."""
    return {"decode_256_tokens_per_s": spread(_decode(engine, rounds, prompt=192))}


def _ttft(engine: Engine, rounds: int, length: int) -> dict[str, Any]:
    engine.one(_prompt(f"warm {length}", length), 1)
    times = [
        engine.one(_prompt(f"ttft {length} {number}", length), 1)[0] for number in _repeat(engine, rounds)
    ]
    return {f"ttft_{length}_s": spread(times)}


def ttft_512(engine: Engine, rounds: int) -> dict[str, Any]:
    """Return the time to the first token of 512 tokens."""
    return _ttft(engine, rounds, 512)


def ttft_2048(engine: Engine, rounds: int) -> dict[str, Any]:
    """Return the time to the first token of 2,048 tokens."""
    return _ttft(engine, rounds, 2048)


def ttft_cached(engine: Engine, rounds: int) -> dict[str, Any]:
    """Return the time to the first token of 2,048 tokens of which 1,920 were computed just before."""
    times = []
    for number in _repeat(engine, rounds):
        known = _prompt(f"known {number}", 1920)
        engine.one(known + _prompt(f"first end {number}", 128), 1)
        times.append(engine.one(known + _prompt(f"second end {number}", 128), 1)[0])
    return {"ttft_cached_s": spread(times)}


def _batch(engine: Engine, rounds: int, size: int) -> dict[str, Any]:
    rates = []
    for number in _repeat(engine, rounds):
        prompts = [_prompt(f"batch {size} {number} {one}", 256) for one in range(size)]
        started = time.perf_counter()
        num_tokens = engine.many(prompts, 128)
        rates.append(num_tokens / (time.perf_counter() - started))
        assert num_tokens == size * 128, f"{num_tokens} tokens of {size * 128}"
    return {f"batch_{size}_tokens_per_s": spread(rates)}


def batch_16(engine: Engine, rounds: int) -> dict[str, Any]:
    """Return output tokens/s of 16 requests at once."""
    return _batch(engine, rounds, 16)


def batch_32(engine: Engine, rounds: int) -> dict[str, Any]:
    """Return output tokens/s of 32 requests at once."""
    return _batch(engine, rounds, 32)


def memory(engine: Engine, rounds: int) -> dict[str, Any]:
    """Run one prompt of 2,048 tokens and nothing else, so that the peak is its."""
    del rounds
    engine.one(_prompt("memory", 2048), 1)
    return {}


PHASES = {
    function.__name__: function
    for function in (decode, decode_256, ttft_512, ttft_2048, ttft_cached, batch_16, batch_32, memory)
}


def spread(values: list[float]) -> dict[str, Any]:
    """Return minimum, median and maximum."""
    return {
        "min": round(min(values), 4),
        "median": round(statistics.median(values), 4),
        "max": round(max(values), 4),
        "n": len(values),
    }


def _prompt(name: str, num_tokens: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(_FIRST_ID, _LAST_ID) for _ in range(num_tokens)]


def _process_age_s() -> float:
    """Return the seconds since this process was started, imports included."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    return uptime_s - ticks / os.sysconf("SC_CLK_TCK")


def peak_rss_mib() -> float:
    """Return VmHWM of this process and its children that live, in MiB."""
    total_kib = 0
    for pid in [os.getpid(), *_below(os.getpid())]:
        try:
            lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        total_kib += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return total_kib / 1024


def _below(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    except OSError:
        return []
    children = [int(one) for one in text.split()]
    return children + [one for child in children for one in _below(child)]
