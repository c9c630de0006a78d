"""How soon a cut stream has no live block left: `python benchmarks/stream_cuts.py [--cuts 1000]`.

Groups of 1 to 8 streamed chat completions are cut at a random moment, before the first token, amid the
answer or near its end, by an orderly close or a reset. Printed is the time from the last cut of a group
until no request and no block of one is left, beside the duration of a step.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import struct
import time
from contextlib import suppress

from common import foreign_cores, report, spread
from rich.console import Console
from rich.progress import Progress
from served import served

from sagellm.engines.embedded import EMBEDDED
from sagellm.server.remote import AdminClient

MAX_STREAMS = 8
LIMIT_S = 0.1  # beyond a step
GIVEN_UP_S = 10.0


def start_stream(port: int, rng: random.Random) -> socket.socket:
    """Send a request and read nothing yet."""
    words = " ".join(rng.choice(["cache", "block", "prompt", "token", "queue"]) for _ in range(64))
    body = {"messages": [{"role": "user", "content": words}], "stream": True, "max_tokens": 200}
    data = json.dumps({**body, "ignore_eos": True}).encode()
    peer = socket.create_connection(("127.0.0.1", port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    kind = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    peer.sendall((head + kind).encode() + data)
    return peer


def cut(peer: socket.socket, rng: random.Random) -> None:
    """Close a connection, by FIN or by RST; what has come and is unread would make any close an RST."""
    if rng.random() < 0.5:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    else:
        peer.setblocking(False)
        with suppress(BlockingIOError):
            while peer.recv(1 << 20):
                pass
    peer.close()


def live_blocks(admin: AdminClient) -> tuple[int, int, int]:
    """Return the requests, the blocks that some request holds, and the steps so far."""
    metrics = admin.metrics()
    return (
        metrics.num_running + metrics.num_waiting,
        metrics.num_held_blocks,
        metrics.modules["scheduler"].num_steps,
    )


def main() -> None:
    """Cut and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--cuts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8766)
    options = parser.parse_args()
    rng, others = random.Random(options.seed), foreign_cores()
    times_s, steps_s, num_cuts, num_alive = [], [], 0, 0
    with (
        served(options.model, options.port, "--num-blocks=4096") as engine,
        AdminClient.connect(engine.socket) as admin,
        Progress(console=Console(stderr=True)) as progress,
    ):
        bar = progress.add_task("cuts", total=options.cuts)
        while num_cuts < options.cuts:
            streams = [start_stream(options.port, rng) for _ in range(rng.randint(1, MAX_STREAMS))]
            _, _, before = live_blocks(admin)
            waited = rng.uniform(0.0, 1.0)
            time.sleep(waited)
            num_requests, _, after = live_blocks(admin)
            num_alive += num_requests
            if after > before:
                steps_s.append(waited / (after - before))
            for peer in streams:
                cut(peer, rng)
            started = time.perf_counter()
            while any(live_blocks(admin)[:2]):
                if time.perf_counter() - started > GIVEN_UP_S:
                    raise SystemExit(f"after {GIVEN_UP_S:.0f} s there are {live_blocks(admin)[:2]} left")
            times_s.append(time.perf_counter() - started)
            num_cuts += len(streams)
            progress.update(bar, completed=num_cuts)
    median_step_s = spread(steps_s)["median"]
    report(
        "stream_cuts",
        foreign_cores=others,
        cuts=num_cuts,
        cut_while_running=num_alive,
        step_ms=spread([1e3 * step for step in steps_s], 2),
        free_after_ms=spread([1e3 * seconds for seconds in times_s], 2),
        longest_ms=round(1e3 * max(times_s), 2),
        later_than_a_step_and_100_ms=sum(seconds > median_step_s + LIMIT_S for seconds in times_s),
    )


if __name__ == "__main__":
    main()
