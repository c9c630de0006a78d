"""What `comm` reads of a machine decides where blocks land: two NUMA nodes with two GPUs each."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from sagellm.comm import LocalTopology
from sagellm.kvmgr.kv_pool import BlockLocation, Placement, plan_migration

BUSES = ("0000:17:00.0", "0000:3d:00.0", "0000:b1:00.0", "0000:d9:00.0")
NODES = (0, 0, 1, 1)


class NVMLError(Exception):
    pass


class FakeNVML:
    """Four GPUs; those of one NUMA node share a PCIe bridge, and there is no NVLink."""

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 1

    def nvmlInit(self):
        pass

    nvmlShutdown = nvmlInit

    def nvmlDeviceGetCount(self):
        return len(BUSES)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return "Big GPU"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=80 << 30)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return 9, 0

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=f"0000{BUSES[handle].upper()}")

    def nvmlDeviceGetNvLinkState(self, handle, port):
        return 0

    def nvmlDeviceGetTopologyCommonAncestor(self, first, second):
        return 30 if NODES[first] == NODES[second] else 50


@pytest.fixture
def placement(tmp_path):
    files = {"sys/devices/system/node/online": "0-1"}
    for node, distances in enumerate(("10 21", "21 10")):
        files[f"sys/devices/system/node/node{node}/distance"] = distances
        files[f"sys/devices/system/node/node{node}/cpulist"] = str(node)
    for bus, node in zip(BUSES, NODES, strict=True):
        files[f"sys/bus/pci/devices/{bus}/numa_node"] = str(node)
    for name, text in files.items():
        path = Path(tmp_path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return Placement(LocalTopology(tmp_path, nvml=FakeNVML()).read())


def test_each_gpu_is_near_to_its_own_node(placement):
    assert placement.places == ("numa:0", "numa:1", "gpu:0", "gpu:1", "gpu:2", "gpu:3")
    for gpu, node in enumerate(NODES):
        neighbour = gpu ^ 1
        assert placement.nearest(f"gpu:{gpu}")[:3] == (f"gpu:{gpu}", f"numa:{node}", f"gpu:{neighbour}")


def test_new_blocks_and_migrations_land_on_the_consumers_node(placement):
    block_bytes = 1 << 20
    free_bytes = {"numa:0": 4 * block_bytes, "numa:1": 4 * block_bytes}
    for gpu, node in enumerate(NODES):
        assert placement.place(f"gpu:{gpu}", block_bytes, free_bytes) == f"numa:{node}"
    blocks = [
        BlockLocation(block_id=gpu, num_bytes=block_bytes, place=f"gpu:{gpu}", consumer=f"gpu:{gpu}")
        for gpu in range(4)
    ]
    gpus = [f"gpu:{gpu}" for gpu in range(4)]
    plan = plan_migration(placement, blocks, free_bytes, drain=gpus)
    assert {move.source: move.target for move in plan.moves} == {
        f"gpu:{gpu}": f"numa:{node}" for gpu, node in enumerate(NODES)
    }
    assert {group.link.kind for group in plan.links} == {"pcie"}
