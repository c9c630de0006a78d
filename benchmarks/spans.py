"""What spans cost: `python benchmarks/spans.py [MODEL]`.

A server of the embedded model in this process answers one completion, so that there is a real request to
tell of; then its span is begun and ended thousands of times and sent to a collector in another process.
Printed: CPU time of this process for each span, the exporting thread's included, and its share of the time
that a server of MODEL, else of the embedded model, takes for a request of 64 tokens and 32 generated, 32 at
once. Short requests to the embedded model are the worst case: its steps take a twentieth of those of 0.6B.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from common import foreign_cores, output_flags, publish, spread
from served import served

from sagellm.engines import AsyncLLMEngine
from sagellm.engines.config import ServerConfig
from sagellm.engines.embedded import EMBEDDED
from sagellm.lab.bench import Lengths, LoadSettings, run_serve
from sagellm.server import create_app
from sagellm.server.http.spans import Spans

NUM_SPANS, CONCURRENCY = 4096, 32
PATH = "/v1/completions"
COLLECTOR = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
print(server.server_port, flush=True)
server.serve_forever()
"""


async def finished_request(url: str) -> tuple[Spans, Any]:
    """Answer a completion; return what makes its span, and its scope."""
    seen: list[Any] = []
    async with AsyncLLMEngine(EMBEDDED, num_blocks=256) as engine:
        settings = ServerConfig(otlp_traces_endpoint=url)
        app = create_app(engine, settings)
        spans: Spans = app.state.spans
        end = spans.end
        spans.end = lambda span, scope, status: (seen.append(scope), end(span, scope, status))  # type: ignore[assignment, method-assign, func-returns-value]
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            body = {"prompt": "a river", "max_tokens": 32, "ignore_eos": True}
            (await client.post(PATH, json=body)).raise_for_status()
        spans.end = end  # type: ignore[method-assign]
    return spans, seen[0]


def request_us(model: str, port: int, num_prompts: int) -> float:
    """Return the time that a server takes for a request, at its full throughput."""
    with served(model, port, "--num-blocks=2048", "--no-enable-prefix-caching"):
        settings = LoadSettings(
            base_url=f"http://127.0.0.1:{port}/v1",
            num_prompts=num_prompts,
            input_len=Lengths.parse("64"),
            output_len=Lengths.parse("32"),
            concurrency=CONCURRENCY,
            vocab_size=500,
            warmup=CONCURRENCY,
        )
        started = time.perf_counter()
        figures = run_serve(settings).figures
        assert figures.num_failed == 0, figures.errors
        return 1e6 * (time.perf_counter() - started) / num_prompts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=EMBEDDED)
    parser.add_argument("--num-prompts", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--port", type=int, default=8766)
    output_flags(parser, "spans")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    others = foreign_cores()
    whole_us = request_us(options.model, options.port, options.num_prompts)
    span_us = []
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True) as collector:
        assert collector.stdout is not None, "a pipe"
        spans, scope = asyncio.run(finished_request(f"http://127.0.0.1:{int(collector.stdout.readline())}"))
        for _ in range(options.rounds):
            begun_ns = time.process_time_ns()
            for number in range(NUM_SPANS):
                spans.end(spans.start(scope), scope, 200)
                if number % 512 == 511:
                    time.sleep(0.05)  # the exporter sends; its queue of 2,048 would overflow
            time.sleep(0.2)
            span_us.append((time.process_time_ns() - begun_ns) / 1e3 / NUM_SPANS)
        spans.close()
        collector.terminate()
    found = spread(span_us, 1)
    share = found["median"] / whole_us
    text = f"a span {found['median']} µs, of {whole_us:,.0f} µs for a request: {share:.2%}"
    publish(
        "spans",
        text,
        options,
        model=Path(options.model).name,
        span_us=found,
        request_us=round(whole_us),
        share=share,
        foreign_cores=others,
    )


if __name__ == "__main__":
    main()
