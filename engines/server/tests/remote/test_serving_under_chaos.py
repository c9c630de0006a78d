"""The served engine, whole and in its own processes, while its fault points fail on purpose."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from sagellm.core import EngineDeadError, EngineError
from sagellm.core.chaos import Chaos
from sagellm.engines import SamplingParams
from sagellm.server.remote import AdminClient
from sagellm.testing.patience import PATIENCE_S, wait_until_async

pytestmark = pytest.mark.full

NUM_SEEDS = 20
DEADLINE_S = 400
NUM_ATTEMPTS = 8
ALLOWED = {"engine_dead", "aborted"}
"""What a request may be told while the core is gone."""
DIED_TWICE = "engine_died_twice"
"""What a request is told that two cores may have died of, innocent or not; it is not to be sent again."""
UNWANTED = (
    "AssertionError",
    "Task exception was never retrieved",
    "never awaited",
    "a step failed",
    "a message cannot be read",
    "sent an invalid message",
    "a frame claims",
)
LOSSES = re.compile(r"core\.socket\.\w+ (?:ConnectionResetError|BrokenPipeError) x (\d+)")

Body = dict[str, Any]
Answer = dict[int, tuple[str, str]]
"""Text and finish reason of each choice."""


class Refused(Exception):
    """An error in OpenAI's form, by its code."""


@dataclass
class Case:
    """A request and the only answer it may have."""

    body: Body
    expected: Answer
    leaves_after: int | None = None  # chunks after which the client goes away


@dataclass
class Server:
    """A server with chaos on, or without it."""

    process: subprocess.Popen[str]
    folder: Path
    url: str = ""
    socket: Path = field(default_factory=Path)

    async def wait_until_ready(self, client: httpx.AsyncClient) -> None:
        async def is_ready() -> bool:
            assert self.process.poll() is None, "the server ended at its start"
            for entry in self.folder.glob("*.json"):
                with suppress(ValueError, httpx.TransportError):
                    told = json.loads(entry.read_text())
                    self.url, self.socket = told["url"], entry.with_suffix(".sock")
                    if (await client.get(f"{self.url}/ready", timeout=PATIENCE_S)).status_code == 200:
                        return True
            return False

        await wait_until_async(is_ready)

    async def call(self, operation: str, **arguments: Any) -> Any:
        """Run an operation in the core; one that is being started again is waited for."""

        def attempt() -> Any:
            with AdminClient.connect(self.socket, timeout_s=PATIENCE_S) as admin:
                return admin.call(operation, **arguments)

        async def answer() -> list[Any]:
            with suppress(EngineDeadError):
                return [await asyncio.to_thread(attempt)]
            return []

        return (await wait_until_async(answer, f"the core did not answer {operation}"))[0]

    async def finish(self, operation: str) -> None:
        """Save or load to its end, or to an error of the device or of a core that is gone."""

        def attempt() -> None:
            with AdminClient.connect(self.socket, timeout_s=PATIENCE_S) as admin:
                number = admin.call(operation, name="all")["number"]
                while admin.call("cache_go_on", number=number)["phase"] != "done":
                    pass

        with suppress(EngineError):
            await asyncio.to_thread(attempt)


def configuration(checkpoint: Path, folder: Path, redis_url: str) -> dict[str, Any]:
    """Memory for less than what runs, so that blocks are evicted, kept in tiers and fetched."""
    return {
        "model": {"name": str(checkpoint), "dtype": "float32", "device": "cpu"},
        "kv": {
            "num_blocks": 96,
            "fetch": "always",
            "save_folder": str(folder / "saves"),
            "tiers": {
                "host": "256KiB",
                "file": {"max_bytes": "4MiB", "folder": str(folder)},
                "redis": {"max_bytes": "16MiB", "url": redis_url, "prefix": folder.name},
            },
        },
        "scheduler": {"max_num_batched_tokens": 128},
        "server": {"port": 0, "shutdown_timeout": 60},
    }


@pytest.fixture(scope="module")
def cases(checkpoint, make_engine) -> list[Case]:
    """Make requests of every kind, with the answers of an engine that has room and no chaos."""
    engine = make_engine(num_blocks=1024)
    rng = random.Random(5)
    texts = ["The river is wide and the bread is old. " * 3, "Is it far to the harbour? " * 4]
    made: list[Case] = []

    def add(prompt: str | list[int], *, leaves_after: int | None = None, **fields: Any) -> Answer:
        options = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True} | fields
        params = SamplingParams(**{key: value for key, value in options.items() if key != "stream"})
        outputs = engine.generate(prompt, params)[0].outputs
        answer = {each.index: (each.text, str(each.finish_reason)) for each in outputs}
        made.append(Case({"prompt": prompt, "stream": True} | options, answer, leaves_after))
        return answer

    shared = [rng.randrange(3, 200) for _ in range(64)]
    for number in range(6):
        add(shared[: 16 * (number % 4 + 1)] + [rng.randrange(3, 200) for _ in range(20)])
    for number in range(2):
        add([7, 8, 9 + number] * 12, leaves_after=2, max_tokens=400)
    for text in texts:
        whole = add(text)[0][0]
        add(text, stop=[whole[8:12]])
        add(text, stream=False)
    for number in range(2):
        add([*shared, number + 3], n=2, temperature=1.0, seed=number)
    add("the river " * 412, max_tokens=4)  # read on another thread
    assert len(made) >= 16
    return made


async def ask(client: httpx.AsyncClient, url: str, case: Case) -> Answer | None:
    """Send one request and return its answer, None if the client left. Raises Refused."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    num_chunks = 0
    async with client.stream("POST", f"{url}/v1/completions", json=case.body) as response:
        if response.status_code != 200 or not case.body["stream"]:
            body = json.loads(await response.aread())
            if "error" in body:
                raise Refused(body["error"]["code"])
            return {each["index"]: (each["text"], each["finish_reason"]) for each in body["choices"]}
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return {index: (text, reasons[index]) for index, text in texts.items()}
            if not line:
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise Refused(chunk["error"]["code"])
            for choice in chunk["choices"]:
                index = choice["index"]
                assert index not in reasons, "text after the end"
                texts[index] = texts.get(index, "") + choice["text"]
                if choice["finish_reason"]:
                    reasons[index] = choice["finish_reason"]
            num_chunks += 1
            if num_chunks == case.leaves_after:
                return None
    raise AssertionError("a stream ended in silence")


async def insist(client: httpx.AsyncClient, url: str, case: Case) -> bool:
    """Ask until there is an answer, which is the right one; all that came before are allowed errors.

    False if the request is not to be sent again.
    """
    for _ in range(NUM_ATTEMPTS):
        try:
            answer = await ask(client, url, case)
        except Refused as refused:
            if str(refused) == DIED_TWICE:
                return False
            if str(refused) not in ALLOWED:
                raise
            continue
        assert answer in (case.expected, None if case.leaves_after else case.expected), case.body
        return True
    raise AssertionError("the engine does not come back")


async def idle(server: Server) -> None:
    """Wait until nothing runs, then look whether every block is free or cached, and the core sound."""

    async def metrics() -> Any:
        told = await server.call("metrics")
        return told if told["num_running"] + told["num_waiting"] == 0 else None

    told = await wait_until_async(metrics)
    pool, cache = told["modules"]["kv_pool"], told["modules"]["prefix_cache"]
    assert cache["num_locked_blocks"] == 0
    assert pool["total_blocks"] - pool["num_free_blocks"] == cache["num_blocks"]
    await server.call("check")


async def drive(server: Server, cases: list[Case]) -> None:
    """Ask everything at once, save, load, ask again, look, and end it while two streams run."""
    async with httpx.AsyncClient(
        timeout=PATIENCE_S, verify=False, limits=httpx.Limits(max_connections=64)
    ) as client:
        await server.wait_until_ready(client)
        answered = await asyncio.gather(*(insist(client, server.url, case) for case in cases))
        assert sum(answered) > len(cases) / 2, "two deaths are blamed on most requests"
        assert (await client.post(f"{server.url}/v1/completions", json={"prompt": 5})).status_code == 400
        saving = server.finish("cache_save")
        await asyncio.gather(saving, *(insist(client, server.url, case) for case in cases[:6]))
        await server.call("cache_clear")
        await server.finish("cache_load")
        await asyncio.gather(*(insist(client, server.url, case) for case in cases[::2]))
        await idle(server)
        await drain(server, client, cases[0])


async def drain(server: Server, client: httpx.AsyncClient, case: Case) -> None:
    """Send SIGTERM while streams run: they are answered, and the server ends without an error."""
    asked = [asyncio.create_task(ask(client, server.url, case)) for _ in range(2)]

    async def have_begun() -> bool:
        num_running = (await server.call("metrics"))["num_running"]
        return sum(not each.done() for each in asked) <= num_running

    await wait_until_async(have_begun)
    server.process.send_signal(signal.SIGTERM)
    for answer in await asyncio.gather(*asked, return_exceptions=True):
        is_refused = isinstance(answer, httpx.ConnectError) or str(answer) in ALLOWED | {
            "shutting_down",
            DIED_TWICE,
        }
        assert answer == case.expected or is_refused, repr(answer)
    await wait_until_async(lambda: server.process.poll() is not None)
    assert server.process.returncode == 0


@pytest.fixture
def survive(checkpoint, cases, tmp_path, redis_url, preloaded_python) -> Callable[..., str]:
    """Run the whole scenario under a seed, None for no chaos, and return what the processes logged."""

    def run(seed: int | None, *, deadline_s: float = DEADLINE_S, **variables: str) -> str:
        runtime, log = tmp_path / "runtime", tmp_path / "log"
        settings = tmp_path / "settings.yaml"
        settings.write_text(json.dumps(configuration(checkpoint, tmp_path, redis_url)))
        chaos = {} if seed is None else {"SAGELLM_CHAOS": str(seed)}
        environment = {
            **os.environ,
            "SAGELLM_RUNTIME_DIR": str(runtime),
            "OMP_NUM_THREADS": "1",
            **chaos,
            **variables,
        }
        command = [preloaded_python, "-m", "sagellm.engines.cli", "llm", "serve", "--config", str(settings)]
        with log.open("w") as errors:
            process = subprocess.Popen(command, env=environment, stderr=errors, text=True)
        try:
            server = Server(process, runtime)
            asyncio.run(asyncio.wait_for(drive(server, cases), deadline_s))
        except BaseException as error:
            error.add_note(log.read_text()[-20_000:])
            raise
        finally:
            process.kill()
            process.wait()
        check_log(said := log.read_text())
        return said

    return run


def check_log(said: str) -> None:
    """The core died of injected losses alone, and nothing was logged that only an error of ours can cause."""
    assert not [word for word in UNWANTED if word in said], said
    assert said.count("is restarted") <= sum(map(int, LOSSES.findall(said))), said


@pytest.mark.parametrize("seed", range(1, NUM_SEEDS + 1))
def test_every_request_is_answered_and_every_block_comes_back(survive, seed):
    said = survive(seed)
    assert said.startswith(f"SAGELLM_CHAOS={seed}: faults are injected on purpose")
    assert f"SAGELLM_CHAOS={seed} injected " in said.splitlines()[-1]


PLANTED = {
    "core.socket.send": """
from sagellm.server.remote import core_server

def flush(self, connection):
    if connection.unsent:
        connection.peer.send(connection.unsent)
        connection.unsent.clear()  # as if all of it had been sent

core_server.CoreServer._flush = flush
""",
    "core.socket.recv": """
from sagellm.server.remote import frames

def add(self, data):
    self._pending[:] = data  # as if a frame always came whole

frames.FrameReader.add = add
""",
}
"""Bugs of the core's process, by the fault point that reveals each."""


@pytest.fixture
def plant(tmp_path) -> Callable[..., dict[str, str]]:
    """Return the variables with which a core's process has these bugs."""

    def write(*sources: str) -> dict[str, str]:
        lines = ["import sys", "if 'sagellm.server.remote.core_process' in sys.orig_argv:"]
        lines += [f"    exec({source!r})" for source in sources]
        folder = tmp_path / "bugs"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text("\n".join(lines))
        return {"PYTHONPATH": str(folder)}

    return write


def wild_seed(point: str) -> int:
    """Return the first seed under which most calls at a point of the first core are short."""
    for seed in range(1, 1000):
        drawn = Chaos(f"{seed}.1").point(point)
        if sum(drawn.draw().share is not None for _ in range(50)) > 30:
            return seed
    raise AssertionError("there is none")


def test_planted_bugs_pass_without_faults(survive, plant):
    survive(None, **plant(*PLANTED.values()))


@pytest.mark.parametrize("point", PLANTED)
def test_a_planted_bug_is_caught(survive, plant, point):
    with pytest.raises((AssertionError, Refused, TimeoutError, httpx.TransportError)):
        survive(wild_seed(point), deadline_s=25, **plant(PLANTED[point]))
