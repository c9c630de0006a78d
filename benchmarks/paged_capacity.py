"""How many sequences run at once before the first preemption, paged against reserved for the maximum.

`python benchmarks/paged_capacity.py`: the lengths of the Azure conversation trace (requests to 4,096 tokens,
each ended by its recorded length), all waiting from the start, the production scheduler and KV code, the
forward pass left out. Memory use gain = running sequences ÷ (capacity in tokens ÷ 4,096).
"""

from __future__ import annotations

import argparse
import csv
import io
import lzma
import random
from pathlib import Path

from common import report, spread
from modelless import modelless_core

from sagellm.core import DEFAULT, PluginRegistry, Runtime
from sagellm.engines import EngineConfig, SamplingParams
from sagellm.engines.engine_core.core import EngineCore
from sagellm.engines.modules import Modules
from sagellm.engines.requests.input_processor import InputProcessor, RequestLimits

LIMIT = 4096
TRACE = Path(__file__).parent / "traces" / "azure_conv.csv.xz"


def lengths() -> list[tuple[int, int]]:
    """Prompt and output tokens of every request of at most 4,096 tokens, in the order of the trace."""
    text = lzma.decompress(TRACE.read_bytes()).decode()
    rows = [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(io.StringIO(text))]
    return [(prompt, output) for prompt, output in rows if prompt and output and prompt + output <= LIMIT]


def make_core(num_blocks: int, block_size: int) -> EngineCore:
    """A core that many sequences may enter at once."""
    config = EngineConfig.from_flat(
        device="cpu",
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=4096,
        max_num_batched_tokens=8192,
    )
    return modelless_core(Modules(PluginRegistry.load(), config), num_blocks)


def measure(num_reserved: int, block_size: int, seed: int) -> dict[str, float]:
    """Fill a pool that would hold `num_reserved` reserved sequences, up to the first preemption."""
    num_blocks = num_reserved * LIMIT // block_size
    core = make_core(num_blocks, block_size)
    limits = RequestLimits(
        vocab_size=1 << 30,
        max_model_len=LIMIT + 1,
        max_model_len_reason="the trace",
        num_blocks=num_blocks,
        block_size=block_size,
        eos_token_ids=frozenset(),
    )
    processor = InputProcessor(None, limits, Runtime.system(seed=0))
    rng = random.Random(seed)
    requests = lengths()
    start = rng.randrange(len(requests) - 2000)
    for prompt, output in requests[start : start + 2000]:
        ids = [rng.randrange(1 << 30) for _ in range(prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        for sequence in processor.process_request(
            ids, params, request_id=None, namespace=DEFAULT, priority=0
        ).sequences:
            core.add(sequence)
    peak, utilisation = 0, 0.0
    scheduler = core.scheduler
    while core.has_unfinished() and scheduler.num_preemptions == 0:
        peak, utilisation = scheduler.num_running, scheduler.num_live_tokens / (num_blocks * block_size)
        core.step()
    return {"running": peak, "gain": peak / num_reserved, "utilisation": utilisation}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--reserved", type=int, default=32, help="sequences of 4,096 tokens that the pool would hold"
    )
    parser.add_argument("--block-size", type=int, default=16)
    options = parser.parse_args()
    runs = [measure(options.reserved, options.block_size, seed) for seed in range(5)]
    report(
        "paged_capacity",
        reserved_sequences=options.reserved,
        block_size=options.block_size,
        running=spread([run["running"] for run in runs]),
        memory_use_gain=spread([run["gain"] for run in runs]),
        utilisation_by_live_tokens=spread([run["utilisation"] for run in runs]),
    )


if __name__ == "__main__":
    main()
