"""How near to the machine's limit are decodes of 1 to 64 sequences, and of long contexts?

`python benchmarks/decode_roofline.py MODEL --plot FILE`: greedy decodes of so many sequences at once, each
behind a prompt of its own, and `--sequences 8 --context 8192` for long ones. A row is the median step in ms,
its tokens/s, and the roofline's: the larger of bytes ÷ read bandwidth and operations ÷ peak over a step, as
the profile counts them, then the same for each operation by itself: attention's bytes and a product's
operations do not overlap. The bandwidth is measured before and after each row, the peak once.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import foreign_cores, output_flags, publish
from make_model import ensure

from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.metrics.limits import read_bandwidth
from sagellm.lab.plots import check_plot

HEAD = "SEQUENCES  CONTEXT  MS (min, median, p99)      TOKENS/S  ROOFLINE (RATIO)  BY OPERATION (RATIO)  READ"


def prompt(rng: random.Random, length: int) -> list[int]:
    """Random token ids, never the same twice, so that no prefix is shared."""
    return [rng.randrange(3, 20_000) for _ in range(length)]


def _most_before(num_sequences: int, context: int) -> int:
    """Return how many tokens the first sequence may decode before the last one's prompt is computed."""
    return 8 + num_sequences * context // 64


def row(engine: LLMEngine, num_sequences: int, context: int, steps: int) -> dict[str, Any]:
    """Decode so many sequences, with `context` tokens in the mean, and set their steps against limits."""
    rng = random.Random(f"{num_sequences} {context}")
    most_before = _most_before(num_sequences, context)
    params = SamplingParams(temperature=0.0, max_tokens=steps + most_before, ignore_eos=True)
    profile = engine.profile
    assert profile is not None, "the engine was asked for one"
    ids = [engine.add_request(prompt(rng, context - steps // 2), params) for _ in range(num_sequences)]
    missing = set(ids)
    with engine.unseen_steps():
        while missing:
            missing -= {each.request_id for each in engine.step() if each.outputs[0].token_ids}
    before = read_bandwidth("cpu").per_s
    engine.step()
    profile.clear()
    times_ms = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        times_ms.append((time.perf_counter() - started) * 1e3)
    after = read_bandwidth("cpu").per_s
    found = profile.figures()
    (decode,) = found.steps
    for each in ids:
        engine.abort_request(each)
    while engine.has_unfinished_requests():
        engine.step()
    assert decode.whole.read_bytes, "the backend counts them"
    assert decode.whole.flops, "the backend counts them"
    peak = found.limits.peaks["bfloat16"].per_s
    bandwidth = (before + after) / 2
    by_bytes_ms, by_operations_ms = decode.whole.read_bytes / bandwidth * 1e3, decode.whole.flops / peak * 1e3
    limit_ms, median_ms = max(by_bytes_ms, by_operations_ms), float(np.median(times_ms))
    parts_ms = sum(
        max((part.read_bytes or 0) / bandwidth, (part.flops or 0) / peak) * 1e3 for part in decode.parts
    )
    return {
        "num_sequences": num_sequences,
        "context": context,
        "ms": [round(float(np.percentile(times_ms, q)), 2) for q in (0, 50, 99)],
        "tokens_per_s": round(num_sequences / median_ms * 1e3, 1),
        "roofline_tokens_per_s": round(num_sequences / limit_ms * 1e3, 1),
        "ratio": round(limit_ms / median_ms, 3),
        "by_operation_tokens_per_s": round(num_sequences / parts_ms * 1e3, 1),
        "by_operation_ratio": round(parts_ms / median_ms, 3),
        "limited_by": "bytes" if by_bytes_ms >= by_operations_ms else "operations",
        "gbytes": round(decode.whole.read_bytes / 1e9, 3),
        "read_gb_s": [round(before / 1e9, 1), round(after / 1e9, 1)],
        "peak_tflop_s": round(peak / 1e12, 3),
    }


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    ms = ", ".join(f"{each:.1f}" for each in row["ms"])
    read = "–".join(f"{each:.0f}" for each in row["read_gb_s"])
    return (
        f"{row['num_sequences']:9}  {row['context']:7}  {ms:25}  {row['tokens_per_s']:8.1f}  "
        f"{row['roofline_tokens_per_s']:8.1f} ({row['ratio']:5.2f})  "
        f"{row['by_operation_tokens_per_s']:12.1f} ({row['by_operation_ratio']:5.2f})  "
        f"{row['gbytes']:5.2f} GB  {read} GB/s, {row['limited_by']}"
    )


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw tokens/s by the number of sequences, beside the roofline."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained", dpi=150)
    axes = figure.subplots()
    sequences = [each["num_sequences"] for each in rows]
    axes.plot(sequences, [each["roofline_tokens_per_s"] for each in rows], "k--", label="roofline")
    each_alone = [each["by_operation_tokens_per_s"] for each in rows]
    axes.plot(sequences, each_alone, "k:", label="each operation at its own limit")
    axes.plot(sequences, [each["tokens_per_s"] for each in rows], "o-", label="measured")
    for each in rows:
        at = (each["num_sequences"], each["tokens_per_s"])
        axes.annotate(f"{each['ratio']:.2f}", at, xytext=(4, -12), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="sequences decoded together", ylabel="tokens/s", title=title)
    axes.set_xticks(sequences, [str(each) for each in sequences], minor=False)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Measure, print, draw and keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, default=256, help="tokens in the mean; default: %(default)s")
    parser.add_argument("--steps", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--plot", type=Path, help="draw tokens/s by sequences")
    output_flags(parser, "decode_roofline")
    options = parser.parse_args()
    check_plot(options.plot)
    if min(options.sequences) < 1 or not 0 < options.steps < options.context:
        parser.error("there must be a sequence, a step, and more tokens of context than steps")
    others, path = foreign_cores(), ensure(options.model)
    most = max(options.sequences)
    longest = options.context + options.steps + _most_before(most, options.context)
    with LLMEngine(
        model=str(path),
        dtype="bfloat16",
        device="cpu",
        num_blocks=most * -(-longest // 16) + 16,
        max_model_len=longest,
        enable_prefix_caching=False,
        profile=True,
    ) as engine:
        rows = []
        for number in options.sequences:
            rows.append(row(engine, number, options.context, options.steps))
            print(line(rows[-1]), file=sys.stderr, flush=True)
    text = "\n".join([HEAD, *map(line, rows)])
    publish("decode_roofline", text, options, foreign_cores=others, rows=rows)
    if options.plot is not None:
        draw(rows, f"{path.name}, {options.context} tokens of context", options.plot)


if __name__ == "__main__":
    main()
