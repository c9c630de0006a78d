"""What spans cost: `python benchmarks/spans.py`.

Two servers of the embedded model, one with a collector of spans and one without, take the same short
requests in turn, the other idle meanwhile; which goes first alternates. Such requests are the worst case:
a step of this model takes a tenth of what one of 0.6B does, and each request is a span. Printed: output
tokens per second and the ratio of each pair, with the mean's 95 % interval. The collector is a thread of
this process, and its work counts.
"""

from __future__ import annotations

import argparse
import math
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from common import foreign_cores, output_flags, publish, spread
from served import served

from sagellm.engines.embedded import EMBEDDED
from sagellm.lab.bench import Lengths, LoadSettings, run_serve

NUM_PROMPTS, CONCURRENCY = 512, 32
INPUT, OUTPUT = Lengths.parse("64"), Lengths.parse("32")
FLAGS = ("--num-blocks=2048", "--no-enable-prefix-caching")


class _Collector(BaseHTTPRequestHandler):
    num_bytes = 0

    def do_POST(self) -> None:
        type(self).num_bytes += len(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def collector() -> Iterator[str]:
    """Take spans while the context is open; gives the URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def load(port: int, seed: int) -> float:
    """Return the output tokens per second of one turn."""
    settings = LoadSettings(
        base_url=f"http://127.0.0.1:{port}/v1",
        num_prompts=NUM_PROMPTS,
        input_len=INPUT,
        output_len=OUTPUT,
        concurrency=CONCURRENCY,
        vocab_size=500,
        seed=seed,
    )
    figures = run_serve(settings).figures
    assert figures.num_failed == 0, figures.errors
    return figures.output_throughput_tokens_per_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--port", type=int, default=8766, help="and the next one; default: %(default)s")
    output_flags(parser, "spans")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("--pairs must be at least 2")
    others = foreign_cores()
    port = options.port
    found: dict[str, list[float]] = {"without": [], "with": []}
    with (
        collector() as url,
        served(EMBEDDED, port, *FLAGS),
        served(EMBEDDED, port + 1, *FLAGS, f"--otlp-traces-endpoint={url}"),
    ):
        turns = [("without", port), ("with", port + 1)]
        for _, each in turns:
            load(each, options.pairs)  # warms both
        for seed in range(options.pairs):
            for name, each in turns[:: 1 if seed % 2 else -1]:
                found[name].append(load(each, seed))
    assert _Collector.num_bytes, "no span came"
    ratios = [a / b for a, b in zip(found["with"], found["without"], strict=True)]
    mean, half = statistics.mean(ratios), 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    lines = [f"{name:8} {spread(values, 0)}" for name, values in found.items()]
    lines.append(f"with / without: {mean:.4f}, 95 % interval {mean - half:.4f} to {mean + half:.4f}")
    publish(
        "spans",
        "\n".join(lines),
        options,
        tokens_per_s={name: spread(values, 1) for name, values in found.items()},
        ratio=spread(ratios),
        interval=[round(mean - half, 4), round(mean + half, 4)],
        foreign_cores=others,
    )


if __name__ == "__main__":
    main()
