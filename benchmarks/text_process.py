"""The cost of rendering and tokenizing in a worker process instead of the caller's.

`python benchmarks/text_process.py`: a conversation of ten messages, a short text and a text of 32 KiB, each
here and through a worker in turn; how long the processes take to start; and how soon a call is answered
after its worker had to be killed. The model is the embedded one unless another directory is given.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import uvloop
from common import foreign_cores, report, spread

from sagellm.engines.embedded import embedded_model
from sagellm.engines.loading.tokenizer import load_tokenizer
from sagellm.engines.text.calls import Encode, Render
from sagellm.engines.text.chat_messages import ChatMessage
from sagellm.engines.text.limits import TextLimits
from sagellm.engines.text.local import LocalTextRunner
from sagellm.server.text_process import ProcessTextRunner

SENTENCE = "The river has three names: one at the spring, one in the valley, and one where it meets the sea. "
CALLS = {
    "ten messages": Render(
        [ChatMessage(("user", "assistant")[i % 2], SENTENCE) for i in range(10)], True, {}
    ),
    "short text": Encode([SENTENCE], True),
    "32 KiB": Encode([(SENTENCE * 400)[: 32 << 10]], True),
}


async def measure(path: Path, rounds: int) -> dict[str, Any]:
    """Return the figures."""
    here, apart = LocalTextRunner(load_tokenizer(path)), ProcessTextRunner(path)
    begin = time.perf_counter()
    await apart.start(TextLimits.of(32_768, timeout_s=60.0))
    start_s = time.perf_counter() - begin
    us: dict[str, Any] = {}
    for name, call in CALLS.items():
        times: dict[str, list[float]] = {"here": [], "apart": []}
        for _ in range(rounds):
            results = []
            for where, runner in (("here", here), ("apart", apart)):
                begin = time.perf_counter()
                results.append(await runner.token_ids(call))
                times[where].append((time.perf_counter() - begin) * 1e6)
            if results[0] != results[1]:
                raise SystemExit(f"{name}: the tokens differ")
        us[name] = {where: spread(values, 1) for where, values in times.items()}
    replaced: list[float] = []
    for _ in range(min(rounds, 20)):
        for pool in apart._pools.values():
            for worker in pool._workers:
                worker.end()
        begin = time.perf_counter()
        await apart.token_ids(CALLS["ten messages"])
        replaced.append((time.perf_counter() - begin) * 1e6)
    await apart.close()
    return {"start_s": round(start_s, 3), "us": us, "us_after_a_killed_worker": spread(replaced, 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=embedded_model())
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    foreign = foreign_cores()
    figures = uvloop.run(measure(options.model, options.rounds))
    report("text_process", model=options.model.name, **figures, foreign_cores=foreign)


if __name__ == "__main__":
    main()
