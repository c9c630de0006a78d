from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from sagellm.core import Runtime, VirtualClock
from sagellm.core.protocols.kv_tier import KVTierProtocol, TierOutcome, TierRequest
from sagellm.testing.conformance import Conformance
from sagellm.testing.kv_tier import KVTierContract, get, make_data, make_header, put
from sagellm.testing.patience import PATIENCE_S, listens, wait_until

pytest.importorskip("redis")

from sagellm.kvmgr.kv_pool.tiers.backend_tier import BackendTier
from sagellm.kvmgr.kv_pool.tiers.backends import DDRBackend
from sagellm.kvmgr.kv_pool.tiers.providers import redis_tier
from sagellm.kvmgr.kv_pool.tiers.storage import TieredKVStorage

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
# Where CI lacks the server these tests fail: a skipped test shows nothing.
pytestmark = pytest.mark.skipif(
    SERVER is None and "CI" not in os.environ, reason="redis-server is not installed"
)

_prefixes = count()


class Server:
    """A real server on a unix socket."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        assert SERVER is not None, "redis-server is not installed, and CI skips no test for want of it"
        options = [
            "--port",
            "0",
            "--unixsocket",
            str(self.socket),
            "--save",
            "",
            "--dir",
            str(self.socket.parent),
        ]
        self.process = subprocess.Popen([SERVER, *options], stdout=subprocess.DEVNULL)
        wait_until(lambda: listens(self.socket), "the server did not start")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("redis"))
    yield started
    started.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """Start a server that a test may stop."""
    started = Server(tmp_path)
    yield started
    started.stop()


def make_tier(
    server: Server, max_bytes: int = 1 << 20, prefix: str | None = None, **options: Any
) -> KVTierProtocol:
    prefix = prefix or f"test{next(_prefixes)}"
    tier = redis_tier(max_bytes, url=server.url, prefix=prefix, timeout_s=PATIENCE_S, **options)
    assert tier.wait_for_search(PATIENCE_S)
    return tier


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def runtime(clock: VirtualClock) -> Runtime:
    return replace(Runtime.system(), clock=clock)


def do_meanwhile(tier: KVTierProtocol, clock: VirtualClock, request: TierRequest) -> TierOutcome:
    """Return a request's outcome; time passes until it is there."""
    tier.submit([request])

    def results():
        clock.advance_ns(1_000_000_000)
        return tier.poll()

    ((_, (outcome,)),) = wait_until(results)
    return outcome


class TestRedisTier(KVTierContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.server = server

    def make(self, max_bytes: int) -> KVTierProtocol:
        return make_tier(self.server, max_bytes)


def test_another_engine_finds_what_is_stored(server):
    first = make_tier(server, prefix="shared")
    put(first, make_header(1), make_data(1))
    second = make_tier(server, prefix="shared")
    assert second.contains(make_header(1).key)
    assert get(second, make_header(1)) == ("done", bytes(make_data(1)))
    assert second.metrics().num_blocks == 1
    first.close()
    second.close()


def test_what_somebody_changed_on_the_server_is_a_miss(server):
    import redis

    tier = make_tier(server, prefix="damage")
    client = redis.Redis.from_url(server.url)
    put(tier, make_header(1), make_data(1))
    (name,) = client.keys("damage:*")
    value = client.get(name)
    for place in range(len(value)):
        client.set(name, value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :])
        assert get(tier, make_header(1))[0] == "corrupt"
        put(tier, make_header(1), make_data(1))
    client.delete(name)
    assert get(tier, make_header(1))[0] == "missing"
    assert tier.metrics().num_corrupt == len(value)
    tier.close()


def test_a_server_that_dies_fails_requests_and_is_found_again(own_server, runtime, clock, caplog):
    server = own_server
    tier = make_tier(server, runtime=runtime)
    assert put(tier, make_header(1), make_data(1)) == "done"
    server.stop()
    assert get(tier, make_header(1))[0] == "failed"
    assert put(tier, make_header(2), make_data(2)) == "failed"
    server.start()
    clock.advance_ns(1_100_000_000)
    assert put(tier, make_header(3), make_data(3)) == "done"
    assert get(tier, make_header(3)) == ("done", bytes(make_data(3)))
    given_up, again = caplog.messages
    assert given_up.startswith("the KV server ")
    assert "given up, 1 times so far" in given_up
    assert "tried again in 1 s" in given_up
    assert again.endswith(" answers again")
    tier.close()


def test_a_server_that_hangs_is_given_up_and_found_again(own_server, runtime, clock):
    server = own_server
    tier = make_tier(server, prefix="hangs", runtime=runtime)
    assert put(tier, make_header(1), make_data(1)) == "done"
    server.process.send_signal(signal.SIGSTOP)
    assert do_meanwhile(tier, clock, TierRequest("get", make_header(1), make_data(0))) == "failed"
    server.process.send_signal(signal.SIGCONT)
    wait_until(lambda: clock.advance_ns(100_000_000) or tier.contains(make_header(1).key))
    assert get(tier, make_header(1)) == ("done", bytes(make_data(1)))
    assert put(tier, make_header(2), make_data(2)) == "done"
    tier.close()


def test_a_storage_goes_on_with_what_its_server_has_after_it_was_away(own_server, runtime, clock):
    server = own_server
    host, below = BackendTier(DDRBackend(1000)), make_tier(server, 1500, prefix="away", runtime=runtime)
    tiered = TieredKVStorage({"host": host, "redis": below})
    for number in range(6):
        assert put(tiered, make_header(number), make_data(number)) == "done"
    kept = [key for key in (make_header(number).key for number in range(6)) if below.contains(key)]
    server.process.send_signal(signal.SIGSTOP)
    for number in range(6, 9):
        request = TierRequest("put", make_header(number), make_data(number))
        assert do_meanwhile(tiered, clock, request) == "done"
    assert not any(map(below.contains, kept))
    server.process.send_signal(signal.SIGCONT)
    wait_until(lambda: clock.advance_ns(100_000_000) or any(map(below.contains, kept)))
    for number in range(9, 30):
        assert put(tiered, make_header(number), make_data(number)) == "done"
        assert get(tiered, make_header(number)) == ("done", bytes(make_data(number)))
    assert 4 <= below.metrics().num_blocks <= 7
    assert tiered.metrics().num_demoted > 20
    assert sum(tiered.level_of(make_header(number).key) == 1 for number in range(30)) >= 4
    tiered.check_integrity()
    tiered.close()


def test_the_kit_checks_it_where_a_server_is_and_says_so_where_none_is(server, tmp_path):
    def check(**options):
        (report,) = Conformance("sagellm-kv-pool").run(kind="kv_tier", name="redis", options=options)
        return report

    report = check(url=server.url, prefix="kit")
    assert (report.unchecked, report.faults) == ("", ())
    assert sum(result.outcome == "passed" for result in report.results) >= 14
    assert "its server or device is not there" in check(url=f"unix://{tmp_path}/none").unchecked
    others = make_tier(server, prefix="others")
    other = replace(make_header(1), model_fingerprint="somebody's")
    put(others, other, make_data(1))
    assert "it has 1 blocks of somebody already" in check(url=server.url, prefix="others").unchecked
    assert get(others, other) == ("done", bytes(make_data(1)))
    others.close()


def test_what_is_no_record_of_ours_is_passed_over(server):
    import redis

    client = redis.Redis.from_url(server.url)
    first = make_tier(server, prefix="a[*]")
    put(first, make_header(1), make_data(1))
    (name,) = client.keys("a\\[\\*]:*")
    client.set(b"a[*]:copied", client.get(name))
    client.rpush("a[*]:list", "x")
    client.set("a[*]:text", "x" * 100_000)
    client.set("a*:" + name.decode().partition(":")[2], client.get(name))
    second = make_tier(server, prefix="a[*]")
    assert [header for header, _ in second.stored()] == [make_header(1)]
    assert get(second, make_header(1)) == ("done", bytes(make_data(1)))
    assert make_tier(server, prefix="*").metrics().num_blocks == 0
    first.close()
    second.close()


def test_a_reply_is_no_longer_than_what_was_asked_for(server):
    import redis

    client = redis.Redis.from_url(server.url)
    tier = make_tier(server, prefix="long")
    put(tier, make_header(1), make_data(1))
    (name,) = client.keys("long:*")
    client.append(name, b"x" * (8 << 20))
    before = client.info("stats")["total_net_output_bytes"]
    assert get(tier, make_header(1))[0] == "corrupt"
    assert client.info("stats")["total_net_output_bytes"] - before < 1 << 20
    assert put(tier, make_header(2), make_data(2)) == "done"
    assert not client.exists(name)
    assert put(tier, make_header(1), make_data(1)) == "done"
    assert get(tier, make_header(1)) == ("done", bytes(make_data(1)))
    tier.check_integrity()
    tier.close()
