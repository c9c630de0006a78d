"""What holds for every engine client: in this process, and over a socket."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from sagellm.core import EngineDeadError, EngineError
from sagellm.engines import SamplingParams
from sagellm.engines.engine_client import BlockingClient, InProcessClient
from sagellm.engines.engine_core.core import EngineCore
from sagellm.engines.requests.input_processor import InputProcessor
from sagellm.server.remote import CoreServer, SocketClient
from sagellm.server.remote.core_process import listen
from sagellm.server.remote.messages import Hello
from sagellm.server.remote.operations import core_operations
from sagellm.testing.patience import PATIENCE_S, wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 40, [5, 6, 8]]


@pytest.fixture
def engine(make_engine):
    return make_engine(num_blocks=64, block_size=8)


@pytest.fixture
def core(engine) -> EngineCore:
    return engine.client.core


@pytest.fixture
def inputs(engine) -> InputProcessor:
    return engine.driver.input


@pytest.fixture
def server(core, inputs, tmp_path) -> Iterator[CoreServer]:
    hello = Hello({"kv.block_size": 8}, inputs.limits, SamplingParams(), os.getpid())
    server = CoreServer(core, listen(tmp_path / "core.sock"), hello, core_operations(core))
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server.stop()
    thread.join()
    server.close()


@pytest.fixture(params=["in process", "socket"])
def client(request, core, tmp_path) -> Iterator[BlockingClient]:
    if request.param == "in process":
        yield InProcessClient(core)
        return
    request.getfixturevalue("server")
    with SocketClient.connect(tmp_path / "core.sock", timeout_s=PATIENCE_S) as client:
        yield client


def run(client: BlockingClient) -> dict[str, list[int]]:
    """Step to the end; return the tokens of each sequence."""
    tokens: dict[str, list[int]] = {}
    while client.has_unfinished():
        for output in client.step():
            if output.token_ids:
                tokens.setdefault(output.sequence_id, []).extend(output.token_ids)
    return tokens


def add(client: BlockingClient, inputs: InputProcessor, prompt, params=GREEDY) -> list[str]:
    request = inputs.process_request(prompt, params)
    client.add([request])
    return request.sequence_ids


def test_the_tokens_are_the_engines_own(client, inputs, make_engine):
    ids = [add(client, inputs, prompt)[0] for prompt in PROMPTS]
    tokens = run(client)
    expected = [output.outputs[0].token_ids for output in make_engine().generate(PROMPTS, GREEDY)]
    assert [tokens[each] for each in ids] == expected


def test_continuations_share_their_prompt_and_have_their_own_seeds(client, inputs):
    params = SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True, logprobs=2)
    ids = add(client, inputs, [5, 6, 7], params)
    tokens = run(client)
    assert sorted(tokens) == sorted(ids)
    assert len({tuple(tokens[each]) for each in ids}) == 3


def test_an_aborted_sequence_gives_no_more_tokens_and_its_blocks_back(client, inputs):
    stays, goes = add(client, inputs, [5, 6, 7])[0], add(client, inputs, [9, 9, 9])[0]
    client.step()
    client.abort([goes, "never heard of"])
    assert len(run(client)[stays]) >= 6
    metrics = client.metrics()
    assert (metrics.num_running, metrics.num_waiting, metrics.num_finished) == (0, 0, 2)


def test_metrics_have_every_module(client):
    modules = client.metrics().modules
    assert modules["kv_pool"].total_blocks == 64
    assert {"prefix_cache", "eviction_policy", "scheduler", "lifetime_predictor"} <= modules.keys()


def test_a_served_core_works_ahead_only_while_it_has_no_sequences(
    core, server, tmp_path, inputs, monkeypatch
):
    busy, rounds = [], []

    def use_idle_time() -> bool:
        busy.append(core.has_unfinished())
        rounds.append(None)
        return len(rounds) % 50 != 0  # else the server waits for a message

    monkeypatch.setattr(core, "use_idle_time", use_idle_time)
    with SocketClient.connect(tmp_path / "core.sock", timeout_s=PATIENCE_S) as client:
        add(client, inputs, PROMPTS[0])
        assert sum(map(len, run(client).values())) == 8
        wait_until(lambda: len(rounds) >= 200)
    assert not any(busy)


def test_an_embedded_core_works_ahead_when_it_is_asked_and_has_no_sequences(make_engine, monkeypatch):
    engine, calls = make_engine(), []
    monkeypatch.setattr(engine.client.core, "use_idle_time", lambda: calls.append(1) or len(calls) < 3)
    engine.add_request([5, 6, 7], GREEDY)
    assert not engine.use_idle_time()
    assert not calls
    while engine.has_unfinished_requests():
        engine.step()
    assert [engine.use_idle_time() for _ in range(3)] == [True, True, False]


def test_a_step_without_sequences_does_nothing(client):
    assert not client.has_unfinished()
    assert list(client.step()) == []


def test_hello_says_what_the_core_takes(server, inputs, tmp_path):
    with SocketClient.connect(tmp_path / "core.sock") as client:
        assert client.hello.limits == inputs.limits
        assert client.hello.config == {"kv.block_size": 8}


def test_two_clients_see_their_own_sequences_alone(server, inputs, tmp_path):
    with (
        SocketClient.connect(tmp_path / "core.sock") as one,
        SocketClient.connect(tmp_path / "core.sock") as two,
    ):
        mine, theirs = add(one, inputs, [5, 6, 7]), add(two, inputs, [5, 6, 8])
        assert (list(run(one)), list(run(two))) == (mine, theirs)


def test_sequences_end_with_their_client(server, engine, hold, inputs, tmp_path):
    hold(engine, 5)  # so that they do not end by themselves
    client = SocketClient.connect(tmp_path / "core.sock")
    add(client, inputs, [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
    client.step()
    client.close()
    with SocketClient.connect(tmp_path / "core.sock", timeout_s=PATIENCE_S) as other:
        assert other.metrics().num_running == 0
        assert other.metrics().num_finished == 1


def test_an_unknown_operation_names_the_nearest(server, tmp_path):
    with SocketClient.connect(tmp_path / "core.sock") as client:
        with pytest.raises(EngineError, match=r"no operation 'metric'.*'metrics'"):
            client.call("metric")
        with pytest.raises(EngineError, match="unexpected keyword"):
            client.call("metrics", nonsense=1)
        assert client.call("ping") > 0


def test_a_message_that_cannot_be_read_ends_its_connection_alone(server, inputs, tmp_path):
    with SocketClient.connect(tmp_path / "core.sock", timeout_s=PATIENCE_S) as good:
        for frame in (b"\xff\xff\xff\xff", b"\x03\0\0\0abc", b"\x01\0\0\0\x80"):
            peer = socket.socket(socket.AF_UNIX)
            peer.connect(str(tmp_path / "core.sock"))
            peer.sendall(frame)
            peer.settimeout(PATIENCE_S)
            while peer.recv(1 << 16):
                pass
            peer.close()
        add(good, inputs, [5, 6, 7])
        assert len(run(good)) == 1


def test_the_socket_is_its_owners_alone(server, tmp_path):
    assert (tmp_path / "core.sock").stat().st_mode & 0o777 == 0o600


def test_a_core_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(EngineDeadError, match=r"no engine answers at none\.sock"):
        SocketClient.connect(tmp_path / "none.sock")
