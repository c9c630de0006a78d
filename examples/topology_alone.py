"""What this machine is made of, without an engine."""

from sagellm.comm import LocalTopology


def main() -> None:
    """Print the parts that decide how a model runs here."""
    reader = LocalTopology()
    machine = reader.read()
    cpu = machine.cpu
    print(f"{machine.hostname}: {cpu.model} ({cpu.architecture})")
    print(f"  {cpu.num_sockets} socket(s), {cpu.num_cores} cores, {cpu.num_threads} threads")
    for cache in cpu.caches:
        print(f"  L{cache.level} {cache.kind}: {cache.num_instances} x {cache.size_bytes >> 10} KiB")
    for node in machine.numa_nodes:
        print(f"  NUMA node {node.node_id}: {len(node.cpu_ids)} CPUs, distances {node.distances}")
    print(f"  memory: {machine.memory_available_bytes >> 20} of {machine.memory_limit_bytes >> 20} MiB left")
    for gpu in machine.gpus:
        print(f"  GPU {gpu.index}: {gpu.name}, {gpu.memory_bytes >> 20} MiB, NUMA node {gpu.numa_node}")
    for link in machine.links:
        print(f"  GPU {link.first_gpu} to GPU {link.second_gpu}: {link.kind}")
    for interface in machine.network:
        print(f"  {interface.name}: {', '.join(interface.addresses)}")
    metrics = reader.metrics()
    print(f"read in {metrics.read_ns / 1e6:.1f} ms; not known: {'; '.join(metrics.warnings) or 'nothing'}")


if __name__ == "__main__":
    main()
