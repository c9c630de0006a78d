"""One simulated run: the front, its clients, the core's processes, and what must hold in the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

from sagellm.core import EngineError, PluginRegistry, Randomness, Runtime, VirtualClock
from sagellm.core.runtime_folder import runtime_folder
from sagellm.engines.config.schema import EngineConfig
from sagellm.lab.simulation.served.client import ENDS, Client, Tenants, WrongAnswerError, key_of
from sagellm.lab.simulation.served.loop import StuckError, VirtualLoop
from sagellm.lab.simulation.served.network import Network, SimTransport
from sagellm.lab.simulation.served.oracle import LAYOUT, LetterTokenizer, state_of
from sagellm.lab.simulation.served.plan import FAULTY_S, Ask, Fault, Plan
from sagellm.lab.simulation.served.process import SimCoreProcess
from sagellm.lab.simulation.served.weather import FaultyFiles, Weather
from sagellm.server.http.app import create_app
from sagellm.server.http.listener import Listener
from sagellm.server.http.server import make_server
from sagellm.server.remote.core_handle import Spawned
from sagellm.server.remote.remote_engine import RemoteEngine

LIMIT_S = 90.0
"""Virtual time after the last fault within which every request must be answered."""
_QUIET_S = 5.0
_MAX_SLICES = 20  # of a compaction
_FRONT = "front"
_EXPECTED = re.compile(
    r"is restarted|cannot start|cannot be started again yet|made no progress|engine's process \d* ?ended"
)
"""Errors that the supervisor logs about deaths, which are faults here."""
_LOGGERS = ("sagellm", "asyncio", "uvicorn")


@dataclass(frozen=True, kw_only=True)
class Violation:
    """Something that must not happen. Shrinking a plan takes two of one kind for the same."""

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run found. Equal plans give equal outcomes."""

    violation: Violation | None
    log_hash: str  # of all that happened, with its times
    virtual_s: float
    num_answered: int
    num_attempts: int
    num_restarts: int


class World(logging.Handler):
    """Everything in one run. As a log handler it turns unexpected errors into violations."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(logging.ERROR)
        self.plan = plan
        self.clock = VirtualClock()
        self.loop = VirtualLoop(self.clock)
        self.loop.set_exception_handler(self._take_exception)
        self.weather = Weather(self.clock, str(plan.seed))
        self.network = self.loop.network = Network(self.loop, self.weather, str(plan.seed), self.log)
        self.network.capacity = plan.link_buffer_bytes
        self.files = FaultyFiles(self.weather)
        self.registry = _registry()
        self.tenants = Tenants()
        self.violation: Violation | None = None
        self._random = Random(f"{plan.seed}/world")
        self._hash = blake2b(digest_size=16)
        self._wall_step_s = 0.0
        self._has_killed = False
        self._processes: list[SimCoreProcess] = []
        self._connections: list[SimTransport] = []
        asks = [event for event in plan.events if isinstance(event, Ask)]
        self.deadly = {state_of(prompt) for ask in asks if ask.is_deadly for prompt in ask.prompts}
        self._clients = [Client(self, ask) for ask in asks]
        self._front: RemoteEngine

    def run(self) -> Outcome:
        """Run the plan."""
        with self._quiet_logs(), _without_collector():
            try:
                self.loop.run_until_complete(self._main())
            except StuckError as error:
                self.violate("stuck", str(error))
            except Exception as error:
                self.violate("crash", f"{type(error).__name__}: {error}")
            finally:
                self._end_loop()
        return Outcome(
            violation=self.violation,
            log_hash=self._hash.hexdigest(),
            virtual_s=self.loop.time(),
            num_answered=sum(client.state == "answered" for client in self._clients),
            num_attempts=sum(client.num_attempts for client in self._clients),
            num_restarts=self.num_deaths,
        )

    @property
    def num_deaths(self) -> int:
        """Processes of the core that have ended, as far as the front has started others."""
        return len(self._processes) - 1

    def may_be_refused(self, ask: Ask) -> bool:
        """Say whether a request may be refused as deadly: it is, or other faults ended two processes."""
        is_deadly = any(state_of(prompt) in self.deadly for prompt in ask.prompts)
        return self.num_deaths >= 2 and (is_deadly or self._has_killed)

    def log(self, text: str) -> None:
        """Record that something happened now."""
        self._hash.update(f"{self.clock.now_ns()} {text};".encode())

    def violate(self, kind: str, message: str) -> None:
        """Record a violation; the first one counts."""
        if self.violation is None:
            self.violation = Violation(kind=kind, message=f"at {self.loop.time():.3f} s: {message}")

    def wall_s(self) -> float:
        """Return the wall clock, which faults set."""
        return 1.7e9 + self._wall_step_s + self.clock.now_ns() / 1e9

    def emit(self, record: logging.LogRecord) -> None:
        """Record an unexpected error as a violation."""
        message = record.getMessage()
        if not _EXPECTED.search(message):
            cause = record.exc_info[1] if record.exc_info else None
            self.violate("error logged", f"{record.name}: {message}" + (f": {cause!r}" if cause else ""))

    def open_connection(self, label: str) -> tuple[asyncio.StreamReader, SimTransport]:
        """Connect a client to the front. Raises OSError."""
        end = self.network.connect(_FRONT, label=label, capacity=self.plan.client_buffer_bytes)
        reader = asyncio.StreamReader(limit=self.plan.client_buffer_bytes, loop=self.loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self.loop)
        transport, _ = self.loop.open_end(end, lambda: protocol)
        self._connections.append(transport)
        return reader, transport

    async def _main(self) -> None:
        config = self._config()
        self._front = RemoteEngine(
            config,
            runtime_folder() / "simulated.sock",
            tokenizer=LetterTokenizer(),
            runtime=Runtime(clock=self.clock, randomness=Randomness(self.plan.seed), files=self.files),
            spawn=self._spawn,
        )
        async with asyncio.timeout(LIMIT_S):
            await self._front.supervisor.start()
        max_num_seqs = config.scheduler.max_num_seqs
        self._app = create_app(self._front, config.server, max_num_seqs=max_num_seqs)
        self._server = make_server(self._app, config.server)
        uvicorn_config = self._server.config
        uvicorn_config.load()
        factory: Any = uvicorn_config.http_protocol_class
        listening: Any = self.network.listen(_FRONT)
        self._connections_of_front = factory.keywords["connections"]
        listener = Listener(listening, lambda: self._make_protocol(factory), self._connections_of_front)
        tasks = self._schedule()
        await self._wait_for(tasks)
        if self.violation is None:
            await self._check_end()
        listener.close()
        await self._front.close()

    def _make_protocol(self, factory: Any) -> asyncio.Protocol:
        made: asyncio.Protocol = factory(
            config=self._server.config, server_state=self._server.server_state, app_state={}
        )
        return made

    def _config(self) -> EngineConfig:
        folder = runtime_folder() / "simulated"
        key = _key_file(folder)
        return EngineConfig().with_values(
            {
                **self.plan.settings,
                "kv.tiers": _tiers(folder, self.plan.num_host_blocks),
                "kv.store_key": str(key),
                "server.api_keys": (key_of(0), key_of(1)),
                "server.access_log": False,
            }
        )

    def _spawn(self, order: dict[str, Any]) -> Spawned:
        if self._processes:
            self.weather.check_descriptor()
        process = SimCoreProcess(self, len(self._processes), order)
        self._processes.append(process)
        self.log("spawn")
        return Spawned(process, process.heartbeat, process.num_cpu_ticks)

    def _schedule(self) -> list[asyncio.Task[None]]:
        """Schedule all events of the plan; return the clients' tasks."""
        clients = iter(self._clients)
        tasks = []
        for event in self.plan.events:
            if isinstance(event, Ask):
                tasks.append(self.loop.create_task(self._run_client(next(clients))))
            else:
                self.loop.call_later(event.at_s, self._cause, event)
        self.loop.call_later(FAULTY_S, self._end_faults)
        return tasks

    async def _run_client(self, client: Client) -> None:
        await asyncio.sleep(client.ask.at_s)
        try:
            await client.run()
        except WrongAnswerError as error:
            self.violate("wrong answer", f"request {client.ask.number}: {error}")
        except Exception as error:
            self.violate("client crash", f"request {client.ask.number}: {error!r}")

    async def _wait_for(self, tasks: list[asyncio.Task[None]]) -> None:
        deadline_s = self.loop.time() + FAULTY_S + LIMIT_S
        while tasks and self.violation is None:
            _, pending = await asyncio.wait(tasks, timeout=1.0)
            tasks = list(pending)
            if tasks and self.loop.time() > deadline_s:
                states = {c.ask.number: c.state for c in self._clients if c.state not in ENDS}
                self.violate("not answered", f"{LIMIT_S:g} s after the last fault: {states}")

    def _cause(self, fault: Fault) -> None:
        self.log(str(fault))
        process = self._processes[-1]
        match fault.kind:
            case "kill" | "freeze" | "lose link":
                self._has_killed = True
                self._end_process(process, fault)
            case "lose client":
                if self._connections:
                    self._random.choice(self._connections).lose()
            case "clock":
                self._wall_step_s += fault.value
            case "compact" | "evict" | "clear" | "metrics":
                task = self.loop.create_task(self._operate(fault.kind))
                task.add_done_callback(lambda done: done.exception())
            case _:
                self.weather.begin(fault.kind, fault.value)

    def _end_faults(self) -> None:
        self.weather.end_all()
        self._processes[-1].thaw()

    def _end_process(self, process: SimCoreProcess, fault: Fault) -> None:
        if fault.kind == "kill":
            process.kill()
        elif fault.kind == "freeze":
            process.freeze(fault.value)
        else:
            for socket in process.peers:
                socket.cut()

    async def _operate(self, kind: str) -> None:
        calls: dict[str, tuple[str, dict[str, Any]]] = {
            "compact": ("pool_compact", {}),
            "evict": ("cache_evict", {"num_blocks": 100}),
            "clear": ("cache_clear", {}),
            "metrics": ("metrics", {}),
        }
        name, arguments = calls[kind]
        try:
            for _ in range(_MAX_SLICES):
                found = await self._front.call(name, **arguments)
                if kind != "compact" or not found["num_moved_blocks"]:
                    break
        except EngineError as error:
            self.log(f"{kind}: {error}")

    async def _check_end(self) -> None:
        """Check that everything is as it was before the first request. Faults have ceased."""
        await asyncio.sleep(max(0.0, FAULTY_S + 1.0 - self.loop.time()))
        for transport in self._connections:
            transport.close()
        deadline_s = self.loop.time() + LIMIT_S
        await asyncio.sleep(_QUIET_S)
        while bad := {await self._get(path) for path in ("/health", "/ready")} - {200}:
            if self.loop.time() > deadline_s:
                self.violate("not ready", f"the probes answer {bad}")
                return
            await asyncio.sleep(1.0)
        await asyncio.sleep(_QUIET_S)
        await self._wait_for_fetches()
        try:
            await self._front.call("check")
        except EngineError as error:
            self.violate("integrity", str(error))
            return
        core, server = self._processes[-1].core, self._processes[-1].server
        assert server is not None, "the front is ready"
        scheduler, kv = core.scheduler, core.kv
        kv.offload.check_integrity()
        counts = {
            "seats": self._app.state.admission.num_live,
            "requests in the front": self._front.num_live,
            "requests in the core": scheduler.num_running + scheduler.num_waiting,
            "blocks": kv.total_blocks - kv.available_blocks,
            "fetches": kv.num_fetches,
            "sequences of peers": server.num_owned,
            "connections": self._connections_of_front.num_open,
        }
        if left := {name: count for name, count in counts.items() if count}:
            self.violate("leak", f"left over: {left}")

    async def _wait_for_fetches(self) -> None:
        """Give an idle core time to finish the fetches from its tiers."""
        deadline_s = self.loop.time() + LIMIT_S
        while self._processes[-1].core.kv.num_fetches and self.loop.time() < deadline_s:
            await asyncio.sleep(1.0)

    async def _get(self, path: str) -> int:
        with suppress(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                reader, transport = self.open_connection(f"probe {path}")
                transport.write(
                    f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
                )
                line = await reader.readline()
                await reader.read()
                return int(line.split()[1])
        return 0

    def _take_exception(self, _: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.violate("exception in a callback", f"{context.get('message')}: {error!r}")

    @contextmanager
    def _quiet_logs(self) -> Iterator[None]:
        """Take what the product logs, and print none of it."""
        loggers = [logging.getLogger(name) for name in _LOGGERS]
        before = [(each.handlers, each.propagate, each.level) for each in loggers]
        for each in loggers:
            each.handlers, each.propagate = [self], False
            each.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for each, (handlers, propagate, level) in zip(loggers, before, strict=True):
                each.handlers, each.propagate = handlers, propagate
                each.setLevel(level)

    def _end_loop(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            with suppress(StuckError):
                self.loop.run_until_complete(asyncio.wait(tasks))
        for process in self._processes:
            process.kill()
        self.loop.close()


def run_plan(plan: Plan) -> Outcome:
    """Run a plan from its start to its end."""
    return World(plan).run()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable the garbage collector, so that nothing depends on when it runs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def _registry() -> PluginRegistry:
    return PluginRegistry.load()


@cache
def _key_file(folder: Path) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / "kv.key"
    path.touch(mode=0o600)
    path.write_text("5a" * 32)
    return path


def _tiers(folder: Path, num_host_blocks: int) -> dict[str, Any]:
    file = {"max_bytes": 40 * 4096, "folder": str(folder), "name": "simulated"}
    return {"host": num_host_blocks * LAYOUT.block_bytes, "file": file}
