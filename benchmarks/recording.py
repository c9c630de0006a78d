"""What recording costs, and whether the recording is true: `python benchmarks/recording.py [MODEL]`.

A server of the embedded model, or of MODEL, is recorded every other round, by `record start` and `stop`,
while clients send completions as fast as they are answered. Printed: throughput and CPU time of the core's
process for each request with and without recording, round by round in pairs, the CPU time of the recorder's
thread alone, and how many requests the recordings have.

Then the embedded model chats with clients of `record_chat.py`, few at once, in a cache too small for all of
it. The recording is replayed as `simulate --cache-only` does, with the same blocks, capacity and policy.
Printed: the share of prompt tokens that the server and that the replay found in the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from common import foreign_cores, output_flags, publish, spread
from record_chat import MAX_TOKENS, chat_with_server
from served import served

from sagellm.core import TraceRequest
from sagellm.engines.config import EngineConfig
from sagellm.engines.embedded import EMBEDDED
from sagellm.lab.bench import Lengths, LoadSettings, run_serve
from sagellm.lab.simulation.bounds import replay
from sagellm.lab.traces import read_trace
from sagellm.server.remote.admin_client import AdminClient

CONCURRENCY = 32


def rounds(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Measure pairs of rounds, without and with recording, in changing order."""
    requests_per_s: dict[bool, list[float]] = {False: [], True: []}
    cpu_ms: dict[bool, list[float]] = {False: [], True: []}
    num_recorded = num_dropped = num_bytes = 0
    thread_us: list[float] = []
    flags = ("--num-blocks=4096", "--max-queued-requests=4096", f"--record-folder={folder}")
    with served(options.model, options.port, *flags) as engine, AdminClient.connect(engine.socket) as admin:
        core = psutil.Process(admin.hello.pid)
        settings = LoadSettings(
            base_url=f"http://127.0.0.1:{options.port}/v1",
            num_prompts=options.num_prompts,
            input_len=Lengths.parse(str(options.prompt)),
            output_len=Lengths.parse(str(options.tokens)),
            concurrency=CONCURRENCY,
            vocab_size=500,
            warmup=0,
        )
        run_serve(settings)
        for number in range(options.rounds):
            for is_recorded in (False, True) if number % 2 else (True, False):
                if is_recorded:
                    others = set(thread_times(core.pid))
                    admin.call("record_start", name=f"round-{number}")
                before = sum(core.cpu_times()[:2])
                figures = run_serve(settings).figures
                assert figures.num_failed == 0, figures.errors
                time.sleep(1)  # all is written now
                if is_recorded:
                    [mine] = (ns for thread, ns in thread_times(core.pid).items() if thread not in others)
                    thread_us.append(mine / 1e3 / options.num_prompts)
                    found = admin.call("record_stop")
                    num_dropped += found["num_dropped"]
                    num_bytes += found["num_bytes"]
                    num_recorded += len(read_trace(found["path"]))
                cpu_ms[is_recorded].append(1e3 * (sum(core.cpu_times()[:2]) - before) / options.num_prompts)
                requests_per_s[is_recorded].append(options.num_prompts / figures.duration_s)
    ratios = [on / off for off, on in zip(requests_per_s[False], requests_per_s[True], strict=True)]
    cpu_ratios = [on / off for off, on in zip(cpu_ms[False], cpu_ms[True], strict=True)]
    return {
        "requests_per_s": {_name(is_recorded=on): spread(values, 1) for on, values in requests_per_s.items()},
        "core_cpu_ms_per_request": {
            _name(is_recorded=on): spread(values, 3) for on, values in cpu_ms.items()
        },
        "throughput_ratio": spread(ratios),
        "core_cpu_ratio": spread(cpu_ratios),
        "recorder_cpu_us_per_request": spread(thread_us, 1),
        "recorder_share_of_core_cpu": round(median(thread_us) / 1e3 / median(cpu_ms[False]), 4),
        "num_sent": options.rounds * options.num_prompts,
        "num_recorded": num_recorded,
        "num_dropped": num_dropped,
        "bytes_per_request": round(num_bytes / max(1, num_recorded)),
    }


def thread_times(pid: int) -> dict[str, int]:
    """Return the CPU time of each thread of a process, in nanoseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks}


def _name(*, is_recorded: bool) -> str:
    return "recorded" if is_recorded else "not recorded"


def chats(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Record conversations without text; return what the server and a replay found in the cache."""
    path = Path(folder) / "chats.jsonl"
    flags = (f"--num-blocks={options.num_blocks}", "--max-num-seqs=4", f"--record={path}")

    with served(EMBEDDED, options.port, f"--max-model-len={4 * MAX_TOKENS}", *flags):
        asyncio.run(chat_with_server(options.port, options.num_chats, options.rate))
    requests = read_trace(path)
    replayed = replay_share(requests, options.num_blocks)
    num_tokens = sum(one.num_prompt_tokens for one in requests)
    served_share = sum(one.num_cached_tokens or 0 for one in requests) / num_tokens
    return {
        "num_requests": len(requests),
        "num_blocks": options.num_blocks,
        "served_cached_share": round(served_share, 4),
        "replayed_cached_share": round(replayed, 4),
        "without_limit": round(replay_share(requests, 1 << 16), 4),
        "difference_points": round(100 * (replayed - served_share), 2),
    }


def replay_share(requests: list[TraceRequest], num_blocks: int) -> float:
    """Return the share of prompt tokens that the cache has when nothing runs at once."""
    config = EngineConfig.from_flat(num_blocks=num_blocks, block_size=requests[0].block_tokens)
    done = replay(requests, config, lambda amount: None)
    return sum(one.num_saved_tokens for one in done) / sum(one.num_prompt_tokens for one in done)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=EMBEDDED)
    parser.add_argument("--rounds", type=int, default=16, help="pairs; default: %(default)s")
    parser.add_argument("--num-prompts", type=int, default=1536, help="in a round; default: %(default)s")
    parser.add_argument("--prompt", type=int, default=64, help="tokens; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=32, help="to generate; default: %(default)s")
    parser.add_argument("--num-chats", type=int, default=1000, help="requests; default: %(default)s")
    parser.add_argument("--rate", type=float, default=16, help="chats per second; default: %(default)s")
    parser.add_argument(
        "--num-blocks", type=int, default=600, help="of the chats' cache; default: %(default)s"
    )
    parser.add_argument("--port", type=int, default=8769)
    output_flags(parser, "recording")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    others = foreign_cores()
    with tempfile.TemporaryDirectory() as folder:
        cost, truth = rounds(options, folder), chats(options, folder)
    text = (
        f"throughput with recording ÷ without: {cost['throughput_ratio']['median']:.4f} in the median of "
        f"{options.rounds} pairs; CPU time of the core {cost['core_cpu_ratio']['median']:.4f}, "
        f"of which the recorder's thread has {cost['recorder_share_of_core_cpu']:.2%}\n"
        f"{cost['num_recorded']:,} of {cost['num_sent']:,} requests recorded\n"
        f"cached: {truth['served_cached_share']:.2%} of the prompt tokens served, "
        f"{truth['replayed_cached_share']:.2%} replayed"
    )
    publish(
        "recording", text, options, model=Path(options.model).name, foreign_cores=others, **cost, chats=truth
    )


if __name__ == "__main__":
    main()
