"""What every topology reader must do. Subclass `TopologyContract` and override `make`."""

from __future__ import annotations

import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor

from sagellm.core.protocols.topology import Topology, TopologyMetrics, TopologyProtocol
from sagellm.testing.cost import slowness


class TopologyContract:
    """The contract of TopologyProtocol as tests."""

    max_read_s = 1.0

    def make(self) -> TopologyProtocol:
        """Return a fresh reader."""
        raise NotImplementedError

    def test_every_count_fits_the_others(self) -> None:
        """Sockets, cores, threads and CPU ids describe one machine."""
        cpu = self.make().read().cpu
        assert 1 <= cpu.num_sockets <= cpu.num_cores <= cpu.num_threads == len(cpu.online_cpu_ids)
        assert list(cpu.online_cpu_ids) == sorted(set(cpu.online_cpu_ids))
        assert list(cpu.allowed_cpu_ids) == sorted(set(cpu.allowed_cpu_ids))
        assert set() < set(cpu.allowed_cpu_ids) <= set(cpu.online_cpu_ids)

    def test_caches_have_a_size_and_serve_the_cpus(self) -> None:
        """No cache is empty, and no level has more instances than there are CPUs."""
        cpu = self.make().read().cpu
        for cache in cpu.caches:
            assert cache.level >= 1
            assert cache.kind in {"data", "instruction", "unified"}
            assert cache.size_bytes > 0
            assert 1 <= cache.num_instances <= cpu.num_threads

    def test_numa_nodes_share_no_cpu_and_are_ten_from_themselves(self) -> None:
        """Nodes partition the online CPUs, and know the distance to each other."""
        topology = self.make().read()
        nodes = topology.numa_nodes
        cpu_ids = [cpu_id for node in nodes for cpu_id in node.cpu_ids]
        assert len(cpu_ids) == len(set(cpu_ids))
        assert set(cpu_ids) <= set(topology.cpu.online_cpu_ids)
        assert len({node.node_id for node in nodes}) == len(nodes)
        for position, node in enumerate(nodes):
            assert len(node.distances) == len(nodes)
            assert node.distances[position] == 10
            assert node.memory_bytes >= 0

    def test_available_memory_is_within_the_limit_and_the_limit_within_the_machine(self) -> None:
        """0 ≤ available ≤ limit ≤ total."""
        topology = self.make().read()
        assert 0 <= topology.memory_available_bytes <= topology.memory_limit_bytes <= topology.memory_bytes

    def test_links_join_two_known_gpus_once(self) -> None:
        """Each pair of GPUs has one link, of a known kind."""
        topology = self.make().read()
        known = {gpu.index for gpu in topology.gpus}
        pairs = [frozenset((link.first_gpu, link.second_gpu)) for link in topology.links]
        assert all(len(pair) == 2 and pair <= known for pair in pairs)
        assert len(set(pairs)) == len(pairs)
        assert {link.kind for link in topology.links} <= {"nvlink", "pcie", "system"}
        nodes = {node.node_id for node in topology.numa_nodes}
        assert {gpu.numa_node for gpu in topology.gpus} - {None} <= nodes

    def test_it_can_be_written_as_json(self) -> None:
        """It contains only plain values."""
        topology = self.make().read()
        assert json.loads(json.dumps(dataclasses.asdict(topology)))["hostname"] == topology.hostname

    def test_reading_twice_finds_the_same_machine(self) -> None:
        """Only the memory in use changes between two readings."""
        reader = self.make()
        first, second = (_without_use(reader.read()) for _ in range(2))
        assert first == second

    def test_metrics_tell_how_the_last_reading_went(self) -> None:
        """They are available even before the first reading."""
        reader = self.make()
        assert isinstance(reader.metrics(), TopologyMetrics)
        reader.read()
        metrics = reader.metrics()
        assert metrics.read_ns >= 0
        assert all(isinstance(warning, str) and warning for warning in metrics.warnings)
        assert len(set(metrics.warnings)) == len(metrics.warnings)

    def test_reading_takes_well_under_a_second(self) -> None:
        """The best of five readings, as the first may load libraries, and others wait for the system."""
        reader, allowed_ns = self.make(), self.max_read_s * 1e9 * slowness()

        def took_ns() -> int:
            start_ns = time.perf_counter_ns()
            reader.read()
            return time.perf_counter_ns() - start_ns

        assert any(took_ns() < allowed_ns for _ in range(5))

    def test_two_readers_in_many_threads_do_not_disturb_each_other(self) -> None:
        """Readers share nothing."""
        readers = [self.make() for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda reader: _without_use(reader.read()), readers))
        assert all(topology == found[0] for topology in found)


def _without_use(topology: Topology) -> Topology:
    """Omit what changes by itself: memory in use, and node memory that the kernel adjusts."""
    nodes = tuple(dataclasses.replace(node, memory_bytes=0) for node in topology.numa_nodes)
    return dataclasses.replace(topology, memory_available_bytes=0, numa_nodes=nodes)
