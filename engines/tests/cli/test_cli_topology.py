"""`topology`: a tree for people, JSON for programs."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from sagellm.core import Topology, TopologyMetrics, TopologyProtocol, UnknownProviderError
from sagellm.core.protocols.topology import CPU, GPU, Cache, Link, NetworkInterface, NullTopology, NumaNode
from sagellm.engines.cli import topology as command
from sagellm.engines.machine import describe_machine
from sagellm.engines.sizes import format_bytes

MACHINE = Topology(
    hostname="crate[1]",
    cpu=CPU(
        model="Fast CPU",
        vendor="V",
        architecture="x86_64",
        num_sockets=1,
        num_cores=4,
        num_threads=8,
        online_cpu_ids=tuple(range(8)),
        allowed_cpu_ids=(0, 1, 2, 5),
        caches=(Cache(level=2, kind="unified", size_bytes=1 << 20, num_instances=4),),
        flags=("avx2", "fpu", "avx512f"),
    ),
    numa_nodes=(NumaNode(node_id=0, cpu_ids=tuple(range(8)), memory_bytes=24 << 30, distances=(10,)),),
    gpus=(
        GPU(
            index=0,
            name="Big GPU",
            memory_bytes=80 << 30,
            compute_capability=(9, 0),
            numa_node=None,
            pci_bus_id="0000:01:00.0",
        ),
    ),
    links=(Link(first_gpu=0, second_gpu=1, kind="nvlink"),),
    network=(NetworkInterface(name="eth0", addresses=("10.0.0.2",), speed_mbit=1000, is_loopback=False),),
    memory_bytes=24 << 30,
    memory_limit_bytes=12 << 30,
    memory_available_bytes=3 << 29,
)


class FakeTopology(TopologyProtocol):
    def read(self):
        return MACHINE

    def metrics(self):
        return TopologyMetrics(read_ns=1, warnings=("the speed of lo",))


@pytest.fixture
def _machine(monkeypatch):
    monkeypatch.setattr(command.PluginRegistry, "resolve", lambda self, kind, name: FakeTopology)


@pytest.mark.usefixtures("_machine")
def test_json_is_the_readers_whole_result(sage):
    shown = sage("llm", "topology", "--json").json
    expected = asdict(MACHINE)
    assert shown.keys() == expected.keys()
    assert shown["cpu"]["allowed_cpu_ids"] == [0, 1, 2, 5]
    assert shown["gpus"][0]["compute_capability"] == [9, 0]
    assert shown["memory_limit_bytes"] == 12 << 30


@pytest.mark.usefixtures("_machine")
def test_people_get_a_tree(sage):
    result = sage("llm", "topology")
    for line in (
        "crate[1]",
        "CPU: Fast CPU",
        "1 sockets, 4 cores, 8 threads, x86_64",
        "this process may use CPUs 0-2,5 of 0-7",
        "flags that choose kernels: avx2, avx512f",
        "L2 unified: 4 × 1 MiB",
        "this process may use 12 GiB",
        "available now 1.5 GiB",
        "node 0: CPUs 0-7, 24 GiB, distances 10",
        "0: Big GPU, 80 GiB, compute capability 9.0, NUMA node unknown, PCI 0000:01:00.0",
        "0 to 1: nvlink",
        "eth0: 10.0.0.2, 1000 Mbit/s",
    ):
        assert line in result.out
    assert result.err == "not known: the speed of lo\n"


def test_the_reader_is_chosen_by_name(sage):
    assert sage("llm", "topology", "--reader", "null", "--json").json["cpu"]["num_cores"] == 1
    result = sage("llm", "topology", "--reader", "nul")
    assert (result.code, "Did you mean 'null'?" in result.err) == (2, True)
    assert NullTopology().read().hostname == ""


def test_the_reader_of_the_configuration_is_taken_where_none_is_named(sage, monkeypatch):
    monkeypatch.setenv("SAGELLM_COMM__TOPOLOGY", "null")
    assert sage("llm", "topology", "--json").json["cpu"]["num_cores"] == 1
    assert describe_machine()["memory_gib"] == round(NullTopology().read().memory_bytes / 2**30, 1)
    monkeypatch.setenv("SAGELLM_COMM__TOPOLOGY", "nul")
    with pytest.raises(UnknownProviderError, match="Did you mean 'null'"):
        describe_machine()


def test_sizes_are_written_in_binary_units():
    assert [format_bytes(size) for size in (0, 1023, 1 << 10, 3 << 29, 5 << 40, 1 << 52)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 GiB",
        "5 TiB",
        "4096 TiB",
    ]
