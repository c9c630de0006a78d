"""A front watches its core: alive inside a long step, not ready when it hangs, replaced when it is frozen."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from sagellm.core import ConfigError, EngineDeadError, EngineError, TokenOutput, VirtualClock
from sagellm.core.protocols.engine import PromptScores, SampledToken
from sagellm.core.runtime_folder import runtime_folder
from sagellm.engines import EngineConfig, SamplingParams
from sagellm.engines.engine_client import RESPONSIVE_S
from sagellm.lab.simulation.served.loop import VirtualLoop
from sagellm.server.remote import CoreServer, RemoteEngine
from sagellm.server.remote.core_handle import Stall, start_process
from sagellm.server.remote.core_process import listen
from sagellm.server.remote.heartbeat import Heartbeat
from sagellm.server.remote.messages import Add, Failed, Hello, Reply, Step, encode
from sagellm.server.remote.operations import core_operations
from sagellm.server.remote.supervisor import Supervisor
from sagellm.server.serve import serve
from sagellm.testing.patience import PATIENCE_S, wait_until, wait_until_async

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture
def heartbeat() -> Heartbeat:
    heartbeat, descriptor = Heartbeat.create()
    os.close(descriptor)
    return heartbeat


def test_a_heartbeat_of_another_process_is_read_in_this_one(heartbeat):
    heartbeat, descriptor = Heartbeat.create()
    before_ns = time.monotonic_ns()
    source = (
        "import sys; from sagellm.server.remote.heartbeat import Heartbeat\n"
        "Heartbeat(int(sys.argv[1])).beat()\n"
        "print([name for name in ('torch', 'numpy', 'msgspec') if name in sys.modules])"
    )
    command = [sys.executable, "-c", source, str(descriptor)]
    done = subprocess.run(command, pass_fds=(descriptor,), capture_output=True, text=True, check=True)
    os.close(descriptor)
    assert done.stdout == "[]\n"
    assert before_ns < heartbeat.last_ns < time.monotonic_ns()
    assert heartbeat.age_s > 0


def test_a_core_beats_between_messages_and_at_each_layer_but_not_while_it_hangs(
    make_engine, tmp_path, heartbeat, monkeypatch
):
    engine = make_engine()
    core = engine.client.core
    hello = Hello({}, engine.driver.input.limits, SamplingParams(), os.getpid())
    server = CoreServer(core, listen(tmp_path / "s"), hello, core_operations(core), beat=heartbeat.beat)
    beats = []
    attention = core.runner.backend._attention._attention
    real = attention.forward

    def attend(*arguments):
        beats.append(heartbeat.last_ns)
        return real(*arguments)

    monkeypatch.setattr(attention, "forward", attend)
    core.add(engine.driver.input.process_request([5, 6, 7], LONG).sequences[0])
    server.turn(0)
    server.turn(0)
    assert len(set(beats)) == len(beats) >= 4, "each layer of each step found a new beat"
    last_ns = heartbeat.last_ns
    wait_until(lambda: time.monotonic_ns() > last_ns + 10_000_000)
    assert heartbeat.last_ns == last_ns, "nothing beats on its own"
    server.close()


class Scripted(RemoteEngine):
    """A front that hears what a test says, in the place of a core."""

    def __init__(self, engine) -> None:
        super().__init__(engine.config, None, tokenizer=engine.tokenizer)
        self._engine = engine
        self.supervisor.wait_until_ready = self.supervisor.reach = self._wait

    async def _wait(self, *_) -> None:
        pass


@pytest.fixture
def scripted(make_engine) -> Scripted:
    return Scripted(make_engine())


@pytest.fixture
def core_frames(scripted) -> list[bytes]:
    """Frames of each message that a core sends, about sequences that the front has."""
    limits = scripted._engine.driver.input.limits
    token = SampledToken(7, -0.5, [(7, -0.5), (8, -1.5)], 1)
    scores = PromptScores(2, bytes(4), bytes(24), bytes(8))
    outputs = [
        TokenOutput(
            "a#0",
            [7],
            num_cached_tokens=2,
            logprobs=[token],
            prompt_scores=scores,
            hidden_states=bytes(4 * limits.hidden_size),
            scheduled_ns=5,
        ),
        TokenOutput("a#0", [9, 8], "stop", 8),
        TokenOutput("b#1", finish_reason="error", error="KeyError: x"),
    ]
    hello = Hello({"kv.num_blocks": 128}, limits, SamplingParams(temperature=0.5), 7)
    messages = [
        hello,
        Failed("no"),
        *[Step(outputs[:n]) for n in (1, 2, 3)],
        Reply(1, {"a": [1]}),
        Reply(2, None, "no"),
    ]
    return [encode(message) for message in messages]


class Transport(asyncio.Transport):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    pause_reading = resume_reading = lambda self: None


async def attack(scripted: Scripted, frames) -> tuple[int, int]:
    """Give links frames as if a core had sent them, about requests that are under way.

    Return how many frames ended their link, and how many requests they ended. Nothing else may happen.
    """
    from sagellm.server.remote.links import Link

    def receive(message):
        if isinstance(message, Hello):
            scripted.config.with_values(message.config)
            scripted._greet(message)
            scripted._greet(hello)
        else:
            scripted._receive(message)

    hello = Hello({}, scripted._engine.driver.input.limits, SamplingParams(), 7)
    scripted._greet(hello)
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, n=2, logprobs=2)
    streams = {}
    num_links = num_requests = 0
    for frame in frames:
        for request_id in ("a", "b"):
            if request_id not in scripted._driver:
                streams[request_id] = await scripted.add_request([5, 6, 7], params, request_id=request_id)
                num_requests += 1
        link, transport = Link(receive, asyncio.get_running_loop().create_future()), Transport()
        link.connection_made(transport)
        link.first.set_result(None)
        link.data_received(frame)
        if transport.is_closed:  # the core is started again
            num_links += 1
            scripted._fail_all(EngineDeadError("the engine's process died"))
            assert scripted.num_live == 0
    return num_links, num_requests - 2


@pytest.fixture
def _quiet(monkeypatch):
    """Keep the thousands of warnings from being collected."""
    monkeypatch.setattr(logging.getLogger("sagellm.server.remote.links"), "disabled", True)


@pytest.mark.usefixtures("_quiet")
def test_the_front_survives_whatever_a_core_sends(scripted, core_frames, mutator):
    mutate = mutator(core_frames, seed=1)
    num_links, num_requests = asyncio.run(attack(scripted, (mutate() for _ in range(1000))))
    assert num_links > 200
    assert num_requests > 2 * num_links, "frames were about requests that were under way"


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("_quiet")
def test_the_front_survives_many_mutated_frames(scripted, core_frames, mutator):
    mutate = mutator(core_frames, seed=2)
    num_links, _ = asyncio.run(attack(scripted, (mutate() for _ in range(100_000))))
    assert num_links > 19_000


def test_a_token_that_the_model_does_not_have_ends_the_link(scripted):
    step = encode(Step([TokenOutput("a#0", [7, 1 << 40])]))
    assert asyncio.run(attack(scripted, [step]))[0] == 1


def test_log_probabilities_of_other_tokens_end_the_link(scripted):
    step = encode(Step([TokenOutput("a#0", [7, 8], logprobs=[SampledToken(7, -0.5, [], 1)])]))
    assert asyncio.run(attack(scripted, [step]))[0] == 1


@pytest.mark.parametrize(("num_halves", "num_links"), [(2, 0), (1, 1), (3, 1), (0, 1)])
def test_hidden_states_of_another_size_end_the_link(scripted, num_halves, num_links):
    states = bytes(2 * num_halves * scripted._engine.driver.input.limits.hidden_size)
    step = encode(Step([TokenOutput("a#0", [7], hidden_states=states)]))
    assert asyncio.run(attack(scripted, [step]))[0] == num_links


def test_a_request_that_cannot_be_encoded_leaves_nothing(scripted):
    from sagellm.core import InvalidRequestError

    async def use():
        scripted.supervisor.core = SimpleNamespace(links=SimpleNamespace(add=encode_it, abort=print))
        with pytest.raises(InvalidRequestError, match="cannot be sent"):
            await scripted.add_request([5], LONG)
        assert scripted.num_live == 0

    def encode_it(requests) -> None:
        encode([Add.of(requests), 1 << 70])  # as a plugin's own parameters may have it

    scripted._greet(Hello({}, scripted._engine.driver.input.limits, SamplingParams(), 7))
    asyncio.run(use())


def test_a_decoder_that_panics_ends_its_request_and_leaves_the_front_alive(scripted, monkeypatch):
    class PanicException(BaseException):
        pass

    def panic(*_):
        raise PanicException("slice index")

    async def use():
        stream = await scripted.add_request([5], LONG, request_id="a")
        monkeypatch.setattr("sagellm.engines.text.detokenizer.IncrementalDetokenizer.append", panic)
        monkeypatch.setattr("sagellm.engines.text.detokenizer.IncrementalDetokenizer.finish", panic)
        scripted._receive(Step([TokenOutput("a#0", [7])]))
        outputs = [output async for output in stream]
        assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].error) == (
            "error",
            "PanicException: slice index",
        )
        again = await scripted.add_request([5], LONG, request_id="b")
        await scripted.abort_request("b")
        assert [output.finished async for output in again] == [True]
        assert scripted.num_live == 0

    scripted._greet(Hello({}, scripted._engine.driver.input.limits, SamplingParams(), 7))
    asyncio.run(use())


# A core as far as its connection goes; {said} is what it says first, and all.
_CORE = """
import json, socket, sys, time
order = json.loads(sys.stdin.readline())
listener = socket.socket(socket.AF_UNIX)
listener.bind(order["socket"])
listener.listen()
peer, _ = listener.accept()
peer.sendall(bytes.fromhex("{said}"))
sys.stdin.read()
"""


def spawn(order):
    """Start a process that makes progress unless it is stopped, even while others have the CPUs."""
    spawned, ticks = start_process(order), count()
    stat = Path(f"/proc/{spawned.process.pid}/stat")

    def num_cpu_ticks():
        with suppress(OSError):  # not Linux, or gone
            if ") T " not in stat.read_text():
                return next(ticks)
        return spawned.num_cpu_ticks()

    return spawned._replace(num_cpu_ticks=num_cpu_ticks)


@pytest.fixture
def speak(tmp_path, monkeypatch):
    """Start a supervisor whose cores are programs without a model, which say something first."""
    supervisors = []

    def start(said: bytes, **settings):
        program = tmp_path / "core.py"
        program.write_text(_CORE.format(said=said.hex()))
        monkeypatch.setattr("sagellm.server.remote.core_handle._PROGRAM", [str(program)])
        heard = []
        supervisor = Supervisor(
            EngineConfig.from_flat(**settings),
            tmp_path / "core.sock",
            on_hello=heard.append,
            on_message=heard.append,
            on_death=heard.append,
            spawn=spawn,
        )
        supervisors.append(supervisor)
        return supervisor, heard

    return start


def hello(**changes) -> bytes:
    from sagellm.core.protocols.engine import RequestLimits

    values = {
        "config": {},
        "limits": RequestLimits(vocab_size=9, max_model_len=9),
        "default_params": SamplingParams(),
        "pid": 1,
    }
    return encode(Hello(**(values | changes)))


@pytest.mark.parametrize(
    "said",
    [
        hello(config={"no.such": 1}),
        pytest.param(hello(config={"kv.block_size": "x"}), marks=pytest.mark.full),
        pytest.param(encode(Reply(1)), marks=pytest.mark.full),
        b"\3\0\0\0abc",
    ],
    ids=["unknown key", "wrong value", "no hello", "no message"],
)
def test_a_core_that_sends_nonsense_is_an_error_and_not_an_endless_wait(speak, said):
    async def use():
        supervisor, _ = speak(said)
        with pytest.raises(EngineDeadError, match="its process ended 4 times"):
            await asyncio.wait_for(supervisor.start(), PATIENCE_S)
        await supervisor.close()

    asyncio.run(use())


@pytest.fixture
def ticks(monkeypatch):
    """Let a supervisor look a hundred times a second, and note what it finds."""
    monkeypatch.setattr("sagellm.server.remote.supervisor._TICK_S", 0.01)
    found, is_over = [], Stall.is_over

    def note(stall, progress):
        found.append(progress)
        return is_over(stall, progress)

    monkeypatch.setattr(Stall, "is_over", note)
    return found


def test_a_frozen_core_is_neither_ready_nor_responsive_and_is_replaced(speak, monkeypatch, ticks, caplog):
    """The heartbeat stops whether the process is suspended or hangs inside a step."""
    clock = VirtualClock(1)
    create = partial(Heartbeat.create, now_ns=clock.now_ns)
    monkeypatch.setattr("sagellm.server.remote.core_handle.Heartbeat.create", create)

    async def use():
        supervisor, heard = speak(hello(), frozen_after_s=0.25)
        await supervisor.start()
        pid = supervisor.core.pid
        while len(ticks) < 100:  # a step that takes long, and comes further
            clock.advance_ns(1_000_000)
            supervisor.core.heartbeat.beat()
            assert (supervisor.is_ready, supervisor.is_responsive) == (True, True)
            await asyncio.sleep(0)
        clock.advance_ns(int(RESPONSIVE_S * 1e9))
        assert (supervisor.is_ready, supervisor.is_responsive, supervisor.num_restarts) == (True, False, 0)
        await wait_until_async(lambda: supervisor.num_restarts and supervisor.is_ready)
        assert supervisor.core.pid != pid
        (error,) = [each for each in heard if isinstance(each, EngineDeadError)]
        assert str(error) == (
            "the engine's process made no progress for 0.25 s and was killed; send the request again"
        )
        frozen, ended, again = [record.getMessage() for record in caplog.records]
        assert frozen.endswith(f"was killed; it was process {pid} (server.frozen_after_s)")
        assert ended == f"the engine's process {pid} ended (signal 9: Killed) and is restarted"
        assert re.fullmatch(r"the engine accepts requests again, after \d+\.\d s", again)
        await supervisor.close()

    asyncio.run(asyncio.wait_for(use(), PATIENCE_S))


def test_frozen_after_0_never_kills(speak, ticks):
    async def use():
        supervisor, _ = speak(hello(), frozen_after_s=0.0)
        await supervisor.start()
        await wait_until_async(lambda: len(ticks) >= 50)
        assert (supervisor.is_ready, supervisor.num_restarts) == (True, 0)
        await supervisor.close()

    asyncio.run(asyncio.wait_for(use(), PATIENCE_S))


def test_a_second_close_does_not_wait_for_a_stopped_core(speak, monkeypatch):
    monkeypatch.setattr("sagellm.server.remote.core_handle._STOP_S", 3600.0)
    monkeypatch.setattr("sagellm.server.remote.core_handle.RESPONSIVE_S", 3600.0)

    async def use():
        supervisor, _ = speak(hello())
        await asyncio.wait_for(supervisor.start(), PATIENCE_S)
        pid = supervisor.core.pid
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        closing = asyncio.create_task(supervisor.close())
        done, _ = await asyncio.wait({closing}, timeout=0.1)
        assert not done, "the process cannot hear of it"
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(use())


# A core whose starts go as {starts} says, one letter each, the last one again and again: `s` speaks, `x`
# exits before it listens, `t` is stopped then, `l` is stopped while it loads, `f` says that it cannot start.
_UNLUCKY = """
import json, os, signal, socket, sys
from pathlib import Path
starts, count = {starts!r}, Path({count!r})
number = len(count.read_text()) if count.exists() else 0
count.write_text("." * (number + 1))
what = starts[min(number, len(starts) - 1)]
order = json.loads(sys.stdin.readline())
if what == "x":
    sys.exit(7)
if what == "t":
    os.kill(os.getpid(), signal.SIGSTOP)
listener = socket.socket(socket.AF_UNIX)
listener.bind(order["socket"])
listener.listen()
peer, _ = listener.accept()
if what == "l":
    os.kill(os.getpid(), signal.SIGSTOP)
peer.sendall(bytes.fromhex({failed!r} if what == "f" else {said!r}))
sys.stdin.read()
"""


@pytest.fixture
def unlucky(speak, tmp_path, monkeypatch):
    """Start a supervisor of cores that start as the letters of a text say."""
    monkeypatch.setattr("sagellm.server.remote.supervisor._PAUSES_S", (0.0, 0.01))
    monkeypatch.setattr("sagellm.server.remote.supervisor._TICK_S", 0.05)
    monkeypatch.setattr("sagellm.server.remote.supervisor._CALM_S", 3600.0)

    def start(starts: str, **settings):
        supervisor, heard = speak(b"", **settings)
        failed, said = encode(Failed("no memory")).hex(), hello().hex()
        count = str(tmp_path / "count")
        program = _UNLUCKY.format(starts=starts, count=count, failed=failed, said=said)
        (tmp_path / "core.py").write_text(program)
        return supervisor, heard

    return start


async def replaced(supervisor) -> None:
    """Kill the core and wait for the next one."""
    before = supervisor.num_restarts
    supervisor.core.kill()
    await wait_until_async(lambda: supervisor.num_restarts > before and supervisor.is_ready)


@pytest.mark.parametrize("starts", ["sxxs", "sffs"], ids=["before it listens", "while it loads"])
def test_a_core_that_fails_to_start_again_is_tried_again(unlucky, starts):
    """What was lacking when the last one died, such as memory, may be there again."""

    async def use():
        supervisor, _ = unlucky(starts)
        await supervisor.start()
        await replaced(supervisor)
        assert supervisor.num_restarts == 3
        await supervisor.close()

    asyncio.run(asyncio.wait_for(use(), PATIENCE_S))


def test_a_core_that_was_ready_once_is_tried_for_ever(unlucky, caplog):
    """Once four deaths within a minute left a server down for good, and clients were told to retry."""

    async def use():
        supervisor, _ = unlucky("sffffffffs")
        await supervisor.start()
        await replaced(supervisor)
        assert supervisor.num_restarts == 9
        told = [record.getMessage() for record in caplog.records]
        assert sum("cannot start: no memory; trying again" in each for each in told) == 8
        await supervisor.close()

    asyncio.run(asyncio.wait_for(use(), PATIENCE_S))


@pytest.fixture
def virtual(tmp_path):
    """Run a coroutine function with a supervisor on virtual time; `spawn` starts its processes."""

    def run(use, spawn):
        loop = VirtualLoop(VirtualClock())
        loop.set_exception_handler(lambda _, context: pytest.fail(str(context)))
        asyncio.set_event_loop(loop)

        async def main():
            deaths = []
            supervisor = Supervisor(
                EngineConfig(),
                tmp_path / "core.sock",
                on_hello=print,
                on_message=print,
                on_death=deaths.append,
                spawn=spawn,
            )
            return await use(supervisor)

        try:
            return loop.run_until_complete(main())
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    return run


def test_pauses_grow_with_each_death_and_requests_are_told_how_long(virtual):
    starts, told = [], []

    def refuse(_):
        starts.append(asyncio.get_running_loop().time())
        raise OSError(12, "Cannot allocate memory")

    async def use(supervisor):
        supervisor._was_ready = True
        supervisor._watching = asyncio.create_task(supervisor._keep_running())
        while len(starts) < 9:
            try:
                await supervisor.wait_until_ready()
            except EngineDeadError as error:
                told.append((supervisor.status, round(error.retry_after_s, 3)))
                await asyncio.sleep(error.retry_after_s)
        await supervisor.close()

    virtual(use, refuse)
    assert [round(later - sooner, 3) for sooner, later in pairwise(starts)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert told == [("waiting to restart", each) for each in (1, 2, 4, 8, 16, 30, 30)]


@pytest.mark.parametrize(("ready_for_s", "pause_s"), [(59, 4), (61, 0)])
def test_the_death_of_a_core_that_was_calm_is_a_first_one_again(virtual, ready_for_s, pause_s):
    async def use(supervisor):
        for _ in range(3):
            supervisor._count_death(None)
        ready_s = asyncio.get_running_loop().time()
        await asyncio.sleep(ready_for_s)
        supervisor._count_death(ready_s)
        return supervisor.pause_s

    assert virtual(use, print) == pause_s


def test_a_pause_is_not_waited_for_by_requests_that_waited_for_the_start_before(virtual):
    def refuse(_):
        raise OSError(12, "Cannot allocate memory")

    async def use(supervisor):
        waiting = asyncio.create_task(supervisor.wait_until_ready())
        await asyncio.sleep(0)
        supervisor._was_ready = True
        supervisor._watching = asyncio.create_task(supervisor._keep_running())
        with pytest.raises(EngineDeadError, match="next start is delayed") as caught:
            await waiting
        assert caught.value.retry_after_s == 1
        await supervisor.close()

    virtual(use, refuse)


def test_a_core_that_is_frozen_while_it_starts_is_replaced(unlucky):
    async def use():
        supervisor, _ = unlucky("stls", frozen_after_s=0.5)
        await supervisor.start()
        await replaced(supervisor)
        assert supervisor.num_restarts == 3
        await supervisor.close()

    asyncio.run(asyncio.wait_for(use(), PATIENCE_S))


def test_a_core_starts_again_when_its_folder_was_removed(unlucky, tmp_path):
    """Where the system removes a session's files, as at the end of a login, servers may live on."""

    async def use():
        supervisor, _ = unlucky("s")
        supervisor._socket = tmp_path / "runtime" / "core.sock"
        await supervisor.start()
        shutil.rmtree(tmp_path / "runtime")
        await replaced(supervisor)
        assert (tmp_path / "runtime").stat().st_mode & 0o777 == 0o700
        await supervisor.close()

    asyncio.run(asyncio.wait_for(use(), PATIENCE_S))


def test_no_core_is_started_in_a_folder_of_others(unlucky, tmp_path):
    async def use():
        supervisor, _ = unlucky("s")
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        supervisor._socket = tmp_path / "open" / "core.sock"
        with pytest.raises(EngineError, match="open must be yours alone"):
            await supervisor.start()
        await supervisor.close()

    asyncio.run(asyncio.wait_for(use(), PATIENCE_S))


def test_a_socket_path_that_is_too_long_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 100)
    monkeypatch.setenv("SAGELLM_RUNTIME_DIR", str(folder))
    with pytest.raises(ConfigError, match=r"a socket's path has at most .* name a shorter folder"):
        serve(EngineConfig.from_flat(port=0), log_level="WARNING", on_state=print)


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_runtime_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch, folder):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SAGELLM_RUNTIME_DIR", str(tmp_path / folder))
    with pytest.raises(ConfigError, match=r"cannot be made: .* name another in SAGELLM_RUNTIME_DIR"):
        runtime_folder()
