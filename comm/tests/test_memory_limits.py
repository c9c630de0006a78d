"""What control groups, of both versions, leave of the machine's memory."""

import pytest

from sagellm.comm import LocalTopology, read_memory

MIB = 1 << 20
KIB_TOTAL, KIB_AVAILABLE = 16 << 20, 12 << 20  # 16 GiB, of which 12 are available
TOTAL, AVAILABLE = KIB_TOTAL << 10, KIB_AVAILABLE << 10
UNLIMITED = 0x7FFFFFFFFFFFF000
VERSION_2 = "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
VERSION_1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755",
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu",
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory",
)


def start(build, cgroup, mounts):
    return build("amd").memory(KIB_TOTAL, KIB_AVAILABLE).process("0-1", cgroup, mounts)


def group_2(machine, path, limit, used_mib, dropped_mib=0):
    folder = f"/sys/fs/cgroup{path}"
    machine.write(f"{folder}/memory.max", limit).write(f"{folder}/memory.current", used_mib * MIB)
    return machine.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {dropped_mib * MIB}\nslab 3")


def group_1(machine, path, limit, used_mib, dropped_mib=0):
    folder = f"/sys/fs/cgroup/memory{path}"
    machine.write(f"{folder}/memory.limit_in_bytes", limit)
    machine.write(f"{folder}/memory.usage_in_bytes", used_mib * MIB)
    stat = f"inactive_file 1\ntotal_cache 7\ntotal_inactive_file {dropped_mib * MIB}"
    return machine.write(f"{folder}/memory.stat", stat)


def read(machine):
    reader = LocalTopology(machine.root)
    topology = reader.read()
    assert topology.memory_bytes == TOTAL
    return topology.memory_limit_bytes, topology.memory_available_bytes, reader.metrics().warnings


def test_without_limits_the_machine_decides(build):
    machine = start(build, "0::/user.slice/job", [VERSION_2])
    group_2(machine, "/user.slice/job", "max", 300)
    assert read(machine)[:2] == (TOTAL, AVAILABLE)


def test_version_2_limits_its_own_group(build):
    machine = start(build, "0::/user.slice/job", [VERSION_2])
    group_2(group_2(machine, "/user.slice", "max", 900), "/user.slice/job", 4096 * MIB, 1000)
    assert read(machine)[:2] == (4096 * MIB, 3096 * MIB)


def test_file_pages_that_the_kernel_can_drop_are_available(build):
    machine = start(build, "0::/job", [VERSION_2])
    group_2(machine, "/job", 4096 * MIB, 1000, dropped_mib=400)
    assert read(machine)[:2] == (4096 * MIB, 3496 * MIB)


def test_the_tightest_ancestor_of_version_2_decides(build):
    machine = start(build, "0::/pods/pod/container", [VERSION_2])
    group_2(machine, "/pods", 8192 * MIB, 7000)  # little is left of the largest
    group_2(machine, "/pods/pod", 2048 * MIB, 500)
    group_2(machine, "/pods/pod/container", 6144 * MIB, 100)
    assert read(machine)[:2] == (2048 * MIB, 1192 * MIB)


def test_version_1_limits_its_own_group(build):
    cgroup = "9:name=systemd:/\n4:memory:/docker/abc\n1:cpu:/other\n0::/"
    machine = start(build, cgroup, VERSION_1)
    group_1(machine, "", UNLIMITED, 9000)
    group_1(machine, "/docker", UNLIMITED, 8000)
    group_1(machine, "/docker/abc", 3072 * MIB, 1024, dropped_mib=24)
    group_1(machine, "/other", 1 * MIB, 1)
    limit, available, warnings = read(machine)
    assert (limit, available) == (3072 * MIB, 2072 * MIB)
    assert not any("group" in warning for warning in warnings)  # version 2 is named, not mounted, not missed


def test_the_tightest_ancestor_of_version_1_decides(build):
    machine = start(build, "4:cpuacct,memory:/a/b", VERSION_1)
    group_1(group_1(machine, "/a", 1024 * MIB, 24), "/a/b", UNLIMITED, 10)
    assert read(machine)[:2] == (1024 * MIB, 1000 * MIB)


def test_both_versions_at_once_are_both_asked(build):
    mounts = (*VERSION_1, "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw")
    machine = start(build, "4:memory:/a\n0::/a", mounts)
    group_1(machine, "/a", 1024 * MIB, 0)
    machine.write("/sys/fs/cgroup/unified/a/cgroup.procs", 1)
    assert read(machine)[:2] == (1024 * MIB, 1024 * MIB)


@pytest.mark.parametrize("path", ["/docker/abc", "/..", "/../sibling"])
def test_in_a_container_the_mount_is_the_groups_own(build, path):
    machine = start(build, f"0::{path}", [VERSION_2.replace(" / /sys", " /docker/abc /sys")])
    group_2(machine, "", 512 * MIB, 12)
    assert read(machine)[:2] == (512 * MIB, 500 * MIB)


def test_a_limit_above_the_machine_is_none(build):
    machine = start(build, "0::/job", [VERSION_2])
    group_2(machine, "/job", 2 * TOTAL, 5)
    assert read(machine)[:2] == (TOTAL, AVAILABLE)


def test_a_group_over_its_limit_has_nothing_left(build):
    machine = start(build, "0::/job", [VERSION_2])
    group_2(machine, "/job", 100 * MIB, 130)
    assert read(machine)[:2] == (100 * MIB, 0)


def test_a_limit_without_its_usage_is_a_warning(build):
    machine = start(build, "0::/job", [VERSION_2]).write("/sys/fs/cgroup/job/memory.max", 100 * MIB)
    limit, available, warnings = read(machine)
    assert (limit, available) == (100 * MIB, 100 * MIB)
    assert any("memory.current" in warning for warning in warnings)


def test_no_group_at_all_is_a_warning(build):
    machine = start(build, "", [VERSION_2])
    limit, _, warnings = read(machine)
    assert limit == TOTAL
    assert any("/proc/self/cgroup" in warning for warning in warnings)


def test_this_machines_memory_can_be_read_by_itself():
    memory = read_memory()
    assert 0 < memory.available_bytes <= memory.limit_bytes <= memory.total_bytes
