"""Builds the files of machines that are not here: /proc and /sys below a folder."""

from pathlib import Path

import pytest

CGROUP_2_MOUNT = "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def ranges(ids):
    """Write ids as the kernel does: `0-3,8`."""
    parts, ids = [], sorted(ids)
    for cpu_id in ids:
        if parts and parts[-1][1] == cpu_id - 1:
            parts[-1][1] = cpu_id
        else:
            parts.append([cpu_id, cpu_id])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def mask(ids):
    """Write ids as the kernel's hexadecimal mask."""
    return f"{sum(1 << cpu_id for cpu_id in ids):08x}"


class Machine:
    """One fake machine. Every method returns it, so that calls chain."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def write(self, path: str, content: object) -> "Machine":
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{content}\n")
        return self

    def cpus(self, cores, *, online=None):
        """`cores` lists (socket, core id, CPU ids of its threads)."""
        ids = sorted(cpu_id for _, _, threads in cores for cpu_id in threads)
        online = ids if online is None else online
        folder = "/sys/devices/system/cpu"
        for name, content in (("possible", ids), ("present", ids), ("online", online)):
            self.write(f"{folder}/{name}", ranges(content))
        self.write(f"{folder}/kernel_max", 8191)
        for socket, core_id, threads in cores:
            package = [i for other, _, group in cores if other == socket for i in group if i in online]
            core = [cpu_id for cpu_id in threads if cpu_id in online]
            for cpu_id in core:
                topology = f"{folder}/cpu{cpu_id}/topology"
                self.write(f"{topology}/physical_package_id", socket).write(f"{topology}/core_id", core_id)
                for name, group in (("core_cpus", core), ("thread_siblings", core)):
                    self.write(f"{topology}/{name}_list", ranges(group))
                    self.write(f"{topology}/{name}", mask(group))
                for name, group in (("package_cpus", package), ("core_siblings", package)):
                    self.write(f"{topology}/{name}_list", ranges(group))
                    self.write(f"{topology}/{name}", mask(group))
        return self

    def cache(self, index, level, kind, size, groups):
        """One cache level: `groups` lists the CPUs that share each instance."""
        for group in groups:
            for cpu_id in group:
                folder = f"/sys/devices/system/cpu/cpu{cpu_id}/cache/index{index}"
                self.write(f"{folder}/level", level).write(f"{folder}/type", kind).write(
                    f"{folder}/size", size
                )
                self.write(f"{folder}/shared_cpu_list", ranges(group))
                self.write(f"{folder}/shared_cpu_map", mask(group))
        return self

    def node(self, node_id, cpu_ids, distances, memory_kib):
        folder = f"/sys/devices/system/node/node{node_id}"
        self.write(f"{folder}/cpulist", ranges(cpu_ids)).write(f"{folder}/cpumap", mask(cpu_ids))
        self.write(f"{folder}/distance", " ".join(map(str, distances)))
        self.write(
            f"{folder}/meminfo", f"Node {node_id} MemTotal:  {memory_kib} kB\nNode {node_id} MemFree: 1 kB"
        )
        nodes = [int(path.name[4:]) for path in (self.root / "sys/devices/system/node").glob("node*")]
        return self.write("/sys/devices/system/node/online", ranges(nodes))

    def cpuinfo(self, cpu_ids, **fields):
        paragraphs = []
        for cpu_id in cpu_ids:
            pairs = {"processor": cpu_id} | {key.replace("_", " "): value for key, value in fields.items()}
            pairs = {"vendor_id" if key == "vendor id" else key: value for key, value in pairs.items()}
            paragraphs.append("\n".join(f"{key}\t: {value}" for key, value in pairs.items()))
        return self.write("/proc/cpuinfo", "\n\n".join(paragraphs) + "\n")

    def memory(self, total_kib, available_kib):
        return self.write(
            "/proc/meminfo", f"MemTotal: {total_kib} kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB"
        )

    def process(self, allowed, cgroup="0::/", mounts=(CGROUP_2_MOUNT,)):
        self.write("/proc/self/status", f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}")
        self.write("/proc/self/mountinfo", "\n".join(mounts))
        return self.write("/proc/self/cgroup", cgroup)


def amd(root):
    """Two CPUs, one node: a small virtual machine on Zen 4."""
    machine = Machine(root).cpus([(0, 0, [0]), (0, 1, [1])])
    machine.cache(0, 1, "Data", "32K", [[0], [1]]).cache(1, 1, "Instruction", "32K", [[0], [1]])
    machine.cache(2, 2, "Unified", "1024K", [[0], [1]]).cache(3, 3, "Unified", "32768K", [[0, 1]])
    machine.node(0, [0, 1], [10], 24_684_096).memory(24_684_096, 24_000_000).process("0-1")
    flags = "fpu lm sse4_2 fma f16c avx avx2 avx512f avx512_bf16 avx512_vnni hypervisor"
    return machine.cpuinfo([0, 1], vendor_id="AuthenticAMD", model_name="AMD EPYC", flags=flags)


def intel(root):
    """Two sockets of four cores with two threads each, a NUMA node a socket, AMX."""
    cores = [
        (socket, core, [socket * 4 + core, 8 + socket * 4 + core]) for socket in (0, 1) for core in range(4)
    ]
    siblings = [threads for _, _, threads in cores]
    machine = Machine(root).cpus(cores)
    machine.cache(0, 1, "Data", "48K", siblings).cache(1, 1, "Instruction", "32K", siblings)
    machine.cache(2, 2, "Unified", "2048K", siblings)
    packages = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    machine.cache(3, 3, "Unified", "107520K", packages)
    machine.node(0, packages[0], [10, 21], 131_072_000).node(1, packages[1], [21, 10], 132_000_000)
    machine.memory(263_072_000, 200_000_000).process("0-3,8-11")
    flags = "fpu lm avx2 avx512f amx_bf16 amx_tile amx_int8 ht"
    name = "Intel(R) Xeon(R) Platinum 8480+"
    return machine.cpuinfo(range(16), vendor_id="GenuineIntel", model_name=name, flags=flags)


def arm(root):
    """Four Neoverse cores without names in cpuinfo, and without cache sizes."""
    machine = Machine(root).cpus([(0, core, [core]) for core in range(4)])
    for cpu_id in range(4):
        machine.write(f"/sys/devices/system/cpu/cpu{cpu_id}/cache/index0/level", 1)
        machine.write(f"/sys/devices/system/cpu/cpu{cpu_id}/cache/index0/type", "Data")
    machine.node(0, range(4), [10], 16_000_000).memory(16_000_000, 15_000_000).process("0-3")
    fields = {"CPU_implementer": "0x41", "CPU_architecture": 8, "CPU_variant": "0x1", "CPU_part": "0xd40"}
    return machine.cpuinfo(range(4), Features="fp asimd asimddp sve i8mm bf16 crc32", **fields)


@pytest.fixture
def amd_root(tmp_path):
    return amd(tmp_path / "amd").root


@pytest.fixture
def intel_root(tmp_path):
    return intel(tmp_path / "intel").root


@pytest.fixture
def arm_root(tmp_path):
    return arm(tmp_path / "arm").root


@pytest.fixture
def build(tmp_path):
    """Return a function that starts a machine: an empty one, or one of those above by its name."""
    kinds = {"empty": Machine, "amd": amd, "intel": intel, "arm": arm}
    return lambda kind="empty": kinds[kind](tmp_path / kind)
