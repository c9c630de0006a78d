"""This machine and others: counts, caches, nodes, and agreement with lscpu."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from sagellm.comm import LocalTopology
from sagellm.comm.tree import parse_ids
from sagellm.testing.topology import TopologyContract

NETWORK_LEFT_OUT = "network interfaces can only be read on the running machine: left out for another root"


class TestLocalTopology(TopologyContract):
    def make(self):
        return LocalTopology()


class TestOtherMachines(TopologyContract):
    @pytest.fixture(autouse=True, params=["amd", "intel", "arm", "empty"])
    def choose(self, request, build):
        self.root = build(request.param).root

    def make(self):
        return LocalTopology(self.root)


def caches(cpu):
    return [(cache.level, cache.kind, cache.size_bytes >> 10, cache.num_instances) for cache in cpu.caches]


def test_a_small_amd_machine(amd_root):
    reader = LocalTopology(amd_root)
    topology = reader.read()
    cpu = topology.cpu
    assert (cpu.model, cpu.vendor, cpu.architecture) == ("AMD EPYC", "AuthenticAMD", "x86_64")
    assert (cpu.num_sockets, cpu.num_cores, cpu.num_threads) == (1, 2, 2)
    assert caches(cpu) == [
        (1, "data", 32, 2),
        (1, "instruction", 32, 2),
        (2, "unified", 1024, 2),
        (3, "unified", 32768, 1),
    ]
    assert {"avx512_bf16", "avx512_vnni"} <= set(cpu.flags)
    assert "hypervisor" not in cpu.flags
    assert topology.memory_bytes == 24_684_096 << 10
    assert reader.metrics().warnings == (NETWORK_LEFT_OUT,)


def test_two_sockets_with_two_threads_a_core(intel_root):
    reader = LocalTopology(intel_root)
    topology = reader.read()
    cpu = topology.cpu
    assert (cpu.num_sockets, cpu.num_cores, cpu.num_threads) == (2, 8, 16)
    assert cpu.allowed_cpu_ids == (0, 1, 2, 3, 8, 9, 10, 11)
    assert caches(cpu) == [
        (1, "data", 48, 8),
        (1, "instruction", 32, 8),
        (2, "unified", 2048, 8),
        (3, "unified", 107520, 2),
    ]
    assert {"amx_bf16", "amx_int8", "amx_tile"} <= set(cpu.flags)
    first, second = topology.numa_nodes
    assert (first.cpu_ids, first.distances) == ((0, 1, 2, 3, 8, 9, 10, 11), (10, 21))
    assert (second.node_id, second.distances) == (1, (21, 10))
    assert second.memory_bytes == 132_000_000 << 10
    assert reader.metrics().warnings == (NETWORK_LEFT_OUT,)


def test_arm_cores_get_their_names_from_numbers(arm_root):
    reader = LocalTopology(arm_root)
    cpu = reader.read().cpu
    assert (cpu.model, cpu.vendor, cpu.architecture) == ("Neoverse-V1", "ARM", "aarch64")
    assert cpu.flags == ("asimd", "asimddp", "bf16", "i8mm", "sve")
    assert cpu.caches == ()
    assert any("cache" in warning for warning in reader.metrics().warnings)


def test_an_arm_core_without_a_name_is_shown_by_its_numbers(build):
    machine = build("arm").cpuinfo(range(4), CPU_implementer="0x7f", CPU_part="0xabc")
    cpu = LocalTopology(machine.root).read().cpu
    assert (cpu.model, cpu.vendor) == ("part 0xabc", "implementer 0x7f")


def test_cpus_that_are_offline_are_not_counted(build):
    machine = build().cpus([(0, 0, [0, 2]), (0, 1, [1, 3])], online=[0, 1, 3])
    machine.node(0, [0, 1, 2, 3], [10], 1000).memory(1000, 900).process("0-3")
    machine.cpuinfo([0, 1, 3], vendor_id="GenuineIntel", model_name="x", flags="lm")
    topology = LocalTopology(machine.root).read()
    assert (topology.cpu.num_cores, topology.cpu.num_threads) == (2, 3)
    assert topology.cpu.allowed_cpu_ids == topology.numa_nodes[0].cpu_ids == (0, 1, 3)


def test_a_node_without_cpus_is_a_node(build):
    machine = build("amd").node(0, [0, 1], [10, 40], 1000).node(2, [], [40, 10], 5000)
    nodes = LocalTopology(machine.root).read().numa_nodes
    assert [(node.node_id, node.cpu_ids, node.memory_bytes >> 10) for node in nodes] == [
        (0, (0, 1), 1000),
        (2, (), 5000),
    ]


def test_a_folder_with_nothing_in_it_is_a_machine_of_one_cpu_and_many_warnings(tmp_path):
    reader = LocalTopology(tmp_path)
    topology = reader.read()
    assert topology.cpu.online_cpu_ids == (0,)
    assert topology.memory_limit_bytes == 0
    missing = " ".join(reader.metrics().warnings)
    for path in ("cpuinfo", "online", "topology", "cache", "node", "meminfo", "cgroup", "status"):
        assert path in missing


@pytest.mark.parametrize(
    ("path", "content", "part"),
    [
        ("/proc/self/status", "Cpus_allowed_list:\tall", "CPUs"),
        ("/proc/cpuinfo", "processor : 0\nCPU implementer : what", "CPUs"),
        ("/sys/devices/system/node/node0/distance", "near far", "distance"),
        ("/sys/devices/system/cpu/online", "0-", "online"),
        ("/proc/meminfo", "MemTotal: much", "MemTotal"),
    ],
)
def test_garbage_is_a_warning_and_never_an_error(build, path, content, part):
    machine = build("amd").write(path, content)
    reader = LocalTopology(machine.root)
    reader.read()
    assert any(part in warning for warning in reader.metrics().warnings)


def test_lists_of_ids():
    assert parse_ids("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert parse_ids("") == ()
    with pytest.raises(ValueError, match="invalid literal"):
        parse_ids("a-b")


def test_affinity_and_interfaces_agree_with_psutil():
    topology = LocalTopology().read()
    assert list(topology.cpu.allowed_cpu_ids) == sorted(psutil.Process().cpu_affinity())
    assert {interface.name for interface in topology.network} == {
        name for name, stats in psutil.net_if_stats().items() if stats.isup
    }
    loopback = [interface for interface in topology.network if interface.is_loopback]
    assert all("127.0.0.1" in interface.addresses for interface in loopback)
    assert topology.memory_bytes == psutil.virtual_memory().total


def lscpu(root, *options):
    if shutil.which("lscpu") is None:
        pytest.skip("lscpu is not installed")
    system = [] if root == Path("/") else ["--sysroot", str(root)]
    environment = os.environ | {"LC_ALL": "C"}
    run = subprocess.run(
        ["lscpu", *system, *options], capture_output=True, text=True, env=environment, check=True
    )
    return run.stdout


def flatten(entries):
    for entry in entries:
        yield entry["field"].rstrip(":"), entry["data"]
        yield from flatten(entry.get("children", []))


def check_against_lscpu(topology, root):
    cpu = topology.cpu
    fields = dict(flatten(json.loads(lscpu(root, "-J"))["lscpu"]))
    assert parse_ids(fields["On-line CPU(s) list"]) == cpu.online_cpu_ids
    rows = [row.split(",") for row in lscpu(root, "-p=CPU,CORE,SOCKET,NODE").splitlines() if row[0] != "#"]
    assert tuple(int(row[0]) for row in rows) == cpu.online_cpu_ids
    assert len({row[2] for row in rows}) == cpu.num_sockets
    assert len({(row[1], row[2]) for row in rows}) == cpu.num_cores
    if fields.get("Socket(s)", "-").isdecimal():  # Arm without firmware tables has clusters instead
        assert int(fields["Socket(s)"]) == cpu.num_sockets
        assert int(fields["Socket(s)"]) * int(fields["Core(s) per socket"]) == cpu.num_cores
    assert fields.get("Model name", "") == cpu.model
    assert fields.get("Vendor ID", "") == cpu.vendor
    nodes = {int(row[3]) for row in rows if row[3]}
    assert int(fields["NUMA node(s)"]) == len(topology.numa_nodes)
    assert nodes == {node.node_id for node in topology.numa_nodes if node.cpu_ids}
    for node in topology.numa_nodes:
        assert parse_ids(fields[f"NUMA node{node.node_id} CPU(s)"] or "") == node.cpu_ids
        assert {int(row[0]) for row in rows if row[3] == str(node.node_id)} == set(node.cpu_ids)


def check_caches_against_lscpu(cpu, root):
    """lscpu gives the size of all instances together and of one; both must agree."""
    found = json.loads(lscpu(root, "-J", "-B", "-C=NAME,ONE-SIZE,ALL-SIZE,TYPE,LEVEL"))["caches"]
    theirs = [(int(c["level"]), c["type"].lower(), int(c["one-size"]), int(c["all-size"])) for c in found]
    ours = [(c.level, c.kind, c.size_bytes, c.size_bytes * c.num_instances) for c in cpu.caches]
    assert sorted(theirs) == sorted(ours)


def test_this_machine_agrees_with_lscpu():
    topology = LocalTopology().read()
    check_against_lscpu(topology, Path("/"))
    check_caches_against_lscpu(topology.cpu, Path("/"))
    assert (
        topology.cpu.architecture
        == dict(flatten(json.loads(lscpu(Path("/"), "-J"))["lscpu"]))["Architecture"]
    )


def test_two_sockets_agree_with_lscpu(intel_root):
    topology = LocalTopology(intel_root).read()
    check_against_lscpu(topology, intel_root)
    check_caches_against_lscpu(topology.cpu, intel_root)


def test_a_small_machine_agrees_with_lscpu(amd_root):
    topology = LocalTopology(amd_root).read()
    check_against_lscpu(topology, amd_root)
    check_caches_against_lscpu(topology.cpu, amd_root)
