"""How many CPUs' time control groups, of both versions, allow."""

import pytest

from sagellm.comm import read_cpu_limit
from sagellm.comm.tree import Tree

VERSION_2 = "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
VERSION_1 = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"


@pytest.mark.parametrize(
    ("job", "parent", "expected"),
    [
        ("max 100000", "max 100000", None),
        ("150000 100000", "max 100000", 1.5),
        ("400000 100000", "100000 50000", 2.0),
        ("", "", None),
    ],
)
def test_the_tightest_group_of_version_2_decides(build, job, parent, expected):
    machine = build("amd").process("0-1", "0::/pods/job", [VERSION_2])
    machine.write("/sys/fs/cgroup/pods/job/cpu.max", job).write("/sys/fs/cgroup/pods/cpu.max", parent)
    assert read_cpu_limit(Tree(machine.root)) == expected


@pytest.mark.parametrize(("quota", "expected"), [(-1, None), (250_000, 2.5)])
def test_version_1_limits_its_own_group(build, quota, expected):
    machine = build("amd").process("0-1", "4:cpu,cpuacct:/job\n3:memory:/job", [VERSION_1])
    folder = "/sys/fs/cgroup/cpu,cpuacct/job"
    machine.write(f"{folder}/cpu.cfs_quota_us", quota).write(f"{folder}/cpu.cfs_period_us", 100_000)
    assert read_cpu_limit(Tree(machine.root)) == expected


def test_this_machines_limit_can_be_read():
    limit = read_cpu_limit()
    assert limit is None or limit > 0
