"""GPUs and their links, told by a stand-in for NVML."""

from types import SimpleNamespace

import pynvml
import pytest

from sagellm.comm import LocalTopology


class NVMLError(Exception):
    pass


class FakeNVML:
    """`gpus` lists PCI ids, `nvlinks` has what is at the end of each port, `ancestors` a level for a pair."""

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 4

    def __init__(self, gpus=(), nvlinks=None, ancestors=None, *, is_bytes=False, fails=()):
        self.gpus, self.nvlinks, self.ancestors = list(gpus), nvlinks or {}, ancestors or {}
        self.is_bytes, self.fails = is_bytes, set(fails)
        self.num_open = 0

    def _check(self, name):
        if name in self.fails:
            raise NVMLError(name)

    def _text(self, text):
        return text.encode() if self.is_bytes else text

    def nvmlInit(self):
        self._check("init")
        self.num_open += 1

    def nvmlShutdown(self):
        self.num_open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        self._check("name")
        return self._text("NVIDIA H200")

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=150_754_820_096)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return 9, 0

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=self._text(self.gpus[handle]))

    def _port(self, handle, port):
        ends = self.nvlinks.get(handle, [])
        if port >= len(ends):
            raise NVMLError("not supported")
        return ends[port]

    def nvmlDeviceGetNvLinkState(self, handle, port):
        return 1 if self._port(handle, port) is not None else 0

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, port):
        return 2 if self._port(handle, port) == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, port):
        return SimpleNamespace(busId=self._text(self._port(handle, port)))

    def nvmlDeviceGetTopologyCommonAncestor(self, first, second):
        if (first, second) not in self.ancestors:
            raise NVMLError("not supported")
        return self.ancestors[first, second]


FIRST, SECOND, THIRD = "00000000:17:00.0", "00000000:3D:00.0", "00000000:B1:00.0"


def read(machine, nvml):
    reader = LocalTopology(machine.root, nvml=nvml)
    topology = reader.read()
    assert nvml.num_open == 0  # what was opened is closed
    return topology, reader.metrics().warnings


def numa(machine, **nodes):
    for bus, node in nodes.items():
        machine.write(f"/sys/bus/pci/devices/0000:{bus.removeprefix('bus_')}:00.0/numa_node", node)
    return machine


@pytest.mark.parametrize("is_bytes", [False, True])
def test_a_gpu_has_its_name_memory_and_numa_node(build, is_bytes):
    machine = numa(build("intel"), bus_17=0, bus_b1=1)
    topology, warnings = read(machine, FakeNVML([FIRST, THIRD], ancestors={(0, 1): 50}, is_bytes=is_bytes))
    first, second = topology.gpus
    assert (first.index, first.name, first.memory_bytes) == (0, "NVIDIA H200", 150_754_820_096)
    assert first.compute_capability == (9, 0)
    assert (first.pci_bus_id, first.numa_node) == ("0000:17:00.0", 0)
    assert (second.pci_bus_id, second.numa_node) == ("0000:b1:00.0", 1)
    assert not any("GPU" in warning for warning in warnings)


def test_a_node_of_minus_one_is_none(build):
    topology, _ = read(numa(build("intel"), bus_17=-1), FakeNVML([FIRST]))
    assert topology.gpus[0].numa_node is None


def test_a_missing_numa_file_is_a_warning(build):
    topology, warnings = read(build("intel"), FakeNVML([FIRST]))
    assert topology.gpus[0].numa_node is None
    assert any("numa_node" in warning and "GPU 0" in warning for warning in warnings)


def test_direct_nvlinks_and_paths_over_the_bus(build):
    nvml = FakeNVML(
        [FIRST, SECOND, THIRD],
        nvlinks={0: [None, SECOND], 1: [FIRST]},
        ancestors={(0, 1): 50, (0, 2): 50, (1, 2): 30},
    )
    topology, _ = read(build("intel"), nvml)
    kinds = {(link.first_gpu, link.second_gpu): link.kind for link in topology.links}
    assert kinds == {(0, 1): "nvlink", (0, 2): "system", (1, 2): "pcie"}


def test_gpus_on_one_switch_are_joined_by_nvlink(build):
    nvml = FakeNVML(
        [FIRST, SECOND, THIRD], nvlinks={0: ["switch"], 1: ["switch"]}, ancestors={(0, 2): 40, (1, 2): 40}
    )
    topology, _ = read(build("intel"), nvml)
    kinds = {(link.first_gpu, link.second_gpu): link.kind for link in topology.links}
    assert kinds == {(0, 1): "nvlink", (0, 2): "pcie", (1, 2): "pcie"}


def test_an_unknown_path_is_the_slowest_and_a_warning(build):
    topology, warnings = read(build("intel"), FakeNVML([FIRST, SECOND]))
    assert topology.links[0].kind == "system"
    assert any("GPUs 0 and 1" in warning for warning in warnings)


def test_no_driver_is_no_gpu_and_no_warning(build):
    topology, warnings = read(build("amd"), FakeNVML(fails=["init"]))
    assert topology.gpus == topology.links == ()
    assert not any("NVIDIA" in warning for warning in warnings)


def test_a_driver_that_cannot_be_asked_is_a_warning(build):
    machine = build("amd").write("/proc/driver/nvidia/version", "NVRM version: 570")
    topology, warnings = read(machine, FakeNVML(fails=["init"]))
    assert topology.gpus == ()
    assert any("NVIDIA driver" in warning for warning in warnings)


def test_a_gpu_that_fails_leaves_the_rest_of_the_machine(build):
    topology, warnings = read(build("amd"), FakeNVML([FIRST], fails=["name"]))
    assert topology.gpus == ()
    assert topology.cpu.num_threads == 2
    assert any("NVML failed" in warning for warning in warnings)


def test_the_numbers_used_here_are_nvmls():
    assert pynvml.NVML_FEATURE_ENABLED == 1
    assert pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH == 2
    assert pynvml.NVML_TOPOLOGY_SYSTEM == 50
    assert pynvml.NVML_TOPOLOGY_NODE < pynvml.NVML_TOPOLOGY_SYSTEM


@pytest.mark.cuda
def test_this_machines_gpus_agree_with_nvml():
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
    topology = LocalTopology().read()
    assert [gpu.name for gpu in topology.gpus] == names
    assert len(topology.links) == len(names) * (len(names) - 1) // 2
