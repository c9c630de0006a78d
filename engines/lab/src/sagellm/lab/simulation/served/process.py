"""A core's process in the simulation: the real server, engine and tiers, with a clock of its own."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Mapping
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any

from sagellm.core import Randomness, Runtime, VirtualClock
from sagellm.core.late_kv_tier import LateKVTier
from sagellm.core.protocols.engine import RequestLimits
from sagellm.engines.assembly import build_computing_core
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_core.building import CorePlan
from sagellm.engines.modules import Modules
from sagellm.engines.sampling.params import SamplingParams
from sagellm.lab.simulation.served.network import SimSocket
from sagellm.lab.simulation.served.oracle import LAYOUT, VOCAB, OracleBackend
from sagellm.lab.simulation.served.plan import HANGS
from sagellm.server.remote.core_server import CoreServer
from sagellm.server.remote.heartbeat import Heartbeat
from sagellm.server.remote.messages import Failed, Hello, encode
from sagellm.server.remote.operations import core_operations

if TYPE_CHECKING:
    from sagellm.lab.simulation.served.world import World

MAX_MODEL_LEN = 96
_FIRST_PID = 1 << 24  # beyond every real one
_TURN_NS, _STEP_NS, _TOKEN_NS = 20_000, 1_000_000, 50_000
_CHECK_EVERY = 16
"""Turns between two checks of all structures."""


class ProcessClock(VirtualClock):
    """The loop's clock, until the process has computed for a while: then it is ahead of it."""

    def __init__(self, base: VirtualClock, wall_s: Callable[[], float]) -> None:
        super().__init__()
        self._base, self._wall_s = base, wall_s
        self._ahead_ns = 0

    def now_ns(self) -> int:
        """Return the time of this process."""
        return max(self._base.now_ns(), self._ahead_ns)

    def wall_s(self) -> float:
        """Return the wall clock, which faults may set."""
        return self._wall_s()

    def advance_ns(self, duration_ns: int) -> None:
        """Let the process compute for this long."""
        self._ahead_ns = self.now_ns() + duration_ns


class SimSelector(selectors.BaseSelector):
    """Finds the simulated sockets that are ready; never waits."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}
        self.on_change: Callable[[], None] = lambda: None
        self.is_idle = False  # whether the last `select` would have waited

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Watch a socket."""
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        fileobj.on_change = self._tell
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Stop watching a socket."""
        fileobj.on_change = None
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready now."""
        ready = []
        for key in self._keys.values():
            socket: Any = key.fileobj
            events = selectors.EVENT_READ if socket.is_readable else 0
            events |= selectors.EVENT_WRITE if socket.is_writable else 0
            if events & key.events:
                ready.append((key, events & key.events))
        self.is_idle = not ready and timeout != 0
        return ready

    def close(self) -> None:
        """Forget all sockets."""
        self._keys.clear()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Return what is watched, by socket."""
        return self._keys

    def _tell(self) -> None:
        self.on_change()


class SimCoreProcess:
    """Stands in for `subprocess.Popen` of a core: listens, loads, serves; may be stopped or killed.

    An exception that leaves the server is a violation, and ends the process as it would end a real one.
    """

    stdin = None

    def __init__(self, world: World, number: int, order: Mapping[str, Any]) -> None:
        self.pid = _FIRST_PID + number
        self.returncode: int | None = None
        self._world, self._order = world, order
        self.clock = ProcessClock(world.clock, world.wall_s)
        self._random = Random(f"{world.plan.seed}/process {number}")
        self.heartbeat, self._descriptor = Heartbeat.create(now_ns=self.clock.now_ns)
        self.server: CoreServer | None = None
        self.core: Any = None
        self.listener: Any = None
        self.selector = SimSelector()
        self.selector.on_change = self._wake
        self._thaws_s, self._froze_s = 0.0, inf
        self._is_due = self._has_crashed = False
        self._num_turns = 0
        world.loop.call_later(self._random.uniform(0.01, 0.1), self._listen)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self.returncode

    def wait(self) -> int:
        """Return the exit code. Only called after `kill`."""
        assert self.returncode is not None, "it is not called while the process runs"
        return self.returncode

    def kill(self) -> None:
        """End it at once, and lose what it was sending."""
        self._end(-9)

    def terminate(self) -> None:
        """End it after its step, or at once while it loads."""
        if self.server is None:
            self._end(-15)
        else:
            self.server.stop()
            self._wake()

    def num_cpu_ticks(self) -> int:
        """Return ticks that grow as if it were always busy, except while it is frozen."""
        return round(100 * min(self._world.loop.time(), self._froze_s))

    def freeze(self, duration_s: float) -> None:
        """Stop it for a while."""
        now_s = self._world.loop.time()
        self._thaws_s = max(self._thaws_s, now_s + duration_s)
        self._froze_s = min(self._froze_s, now_s)

    def thaw(self) -> None:
        """Resume it, unless it hangs."""
        if self._thaws_s < HANGS:
            self._thaws_s, self._froze_s = 0.0, inf
            self._is_due = False
            self._wake()

    @property
    def peers(self) -> list[SimSocket]:
        """Its end of each connection."""
        return [each for each in self.selector.get_map() if isinstance(each, SimSocket)]

    def _listen(self) -> None:
        if self.returncode is None:
            self.listener = self._world.network.listen(self._order["socket"])
            self._world.loop.call_later(self._random.uniform(0.1, 1.5), self._load)

    def _load(self) -> None:
        if self.returncode is not None:
            return
        config = EngineConfig.from_values(self._order["config"])
        runtime = Runtime(
            clock=self.clock,
            randomness=Randomness(self._random.getrandbits(32)),
            files=self._world.files,
        )
        num_blocks = config.kv.num_blocks
        assert num_blocks is not None, "every plan has it"
        try:
            plan = CorePlan(
                modules=Modules(self._world.registry, config),
                layout=LAYOUT,
                num_blocks=num_blocks,
                vocab_size=VOCAB,
                runtime=runtime,
                fingerprint=lambda: "oracle",
            )
            backend = OracleBackend(self._compute, deadly=self._world.deadly, die=self._crash)
            self.core = build_computing_core(plan, backend)
        except Exception as error:
            self._fail_to_load(error)
            return
        offload = self.core.kv.offload
        offload.tiers = LateKVTier(offload.tiers, runtime.randomness.stream("late tiers"))
        limits = RequestLimits(
            vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN, num_blocks=num_blocks, block_size=LAYOUT.block_size
        )
        values = {key: value for key, value in config.values().items() if key.startswith("scheduler.")}
        self.server = _Server(self, Hello(values, limits, SamplingParams(), self.pid))
        self._wake()

    def _fail_to_load(self, error: Exception) -> None:
        """Tell the reason and end, as `core_process` does."""
        for peer in self.listener.pending:
            peer.send(encode(Failed(str(error))))
        self._end(1)

    def _compute(self, num_tokens: int) -> None:
        self.heartbeat.beat()
        self.clock.advance_ns(_STEP_NS + _TOKEN_NS * num_tokens)

    def _crash(self) -> None:
        """End after this step, as of a segmentation fault in it."""
        self._has_crashed = True

    def _wake(self) -> None:
        if not self._is_due and self.server is not None and self.returncode is None:
            self._is_due = True
            self._world.loop.call_at(self.clock.now_ns() / 1e9, self._turn)

    def _turn(self) -> None:
        self._is_due = False
        server, loop = self.server, self._world.loop
        if self.returncode is not None or server is None:
            return
        if self._thaws_s > loop.time():
            self._is_due = True
            loop.call_at(self._thaws_s, self._turn)
            return
        try:
            if server.is_stopping:
                server.close()
                self._end(0)
                return
            server.turn()
            if self._has_crashed:
                self._end(-11)
                return
            self._num_turns += 1
            if self._num_turns % _CHECK_EVERY == 0:
                self.core.kv.check_integrity()
                failed = self.core.parts.passes.metrics().failures
                assert not failed, f"the engine goes on without passes that failed: {failed}"
        except Exception as error:
            self._world.violate("core crash", f"{type(error).__name__}: {error}")
            self._end(1)
            return
        self.clock.advance_ns(_TURN_NS)
        if not self.selector.is_idle:
            self._wake()
        else:
            loop.call_later(0.5, self._wake)

    def _end(self, code: int) -> None:
        if self.returncode is not None:
            return
        self.returncode = code
        self._world.log(f"process {self.pid - _FIRST_PID} ends with {code}")
        for socket in self.peers:
            socket.cut()
        if self.listener is not None:
            self.listener.close()
        os.close(self._descriptor)


class _Server(CoreServer):
    """The server on the clock and the sockets of its process."""

    def __init__(self, process: SimCoreProcess, hello: Hello) -> None:
        self._process = process
        operations = core_operations(process.core)
        super().__init__(process.core, process.listener, hello, operations, beat=process.heartbeat.beat)

    def now_ns(self) -> int:
        """Return the process's time."""
        return self._process.clock.now_ns()

    def make_selector(self) -> SimSelector:
        """Return the process's selector."""
        return self._process.selector
