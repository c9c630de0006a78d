"""CPU, threads, memory and devices."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from sagellm.comm import read_cpu_limit
from sagellm.engines.cli.doctor.report import ExaminationContext, Section
from sagellm.engines.cli.topology import id_ranges
from sagellm.engines.machine import FIXING_VARIABLES, kernel_flags
from sagellm.engines.sizes import format_bytes

THREAD_VARIABLES = (*FIXING_VARIABLES, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_LOAD_WINDOW_S = 0.2
LITTLE_MEMORY_BYTES = 2 << 30


def examine_cpu(context: ExaminationContext) -> Section:
    """Look at the CPU and the flags that choose kernels."""
    section = Section("cpu")
    if context.topology is None:
        section.error(
            "the hardware cannot be read: no topology reader works",
            "pip install --force-reinstall sagellm-comm; `sage plugins list` says what is installed",
        )
        return section
    cpu = context.topology.cpu
    flags = kernel_flags(cpu.flags)
    section.facts = {
        "model": cpu.model,
        "cores": f"{cpu.num_cores} in {cpu.num_sockets} socket(s), {cpu.num_threads} thread(s)",
        "allowed CPUs": id_ranges(cpu.allowed_cpu_ids),
        "flags": flags,
    }
    if cpu.architecture == "x86_64" and "avx2" not in flags:
        section.warn(
            "the CPU has no AVX2; arithmetic is many times slower", "use a CPU made after 2015, or a GPU"
        )
    return section


def examine_threads(context: ExaminationContext) -> Section:
    """Compare torch's number of threads with the CPUs that this process may use, and with the load."""
    import torch

    num_threads = torch.get_num_threads()
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if context.topology is not None:  # two threads on one core only slow each other down
        num_cpus = min(num_cpus, context.topology.cpu.num_cores)
    limit = read_cpu_limit()
    if limit is not None:
        num_cpus = max(1, min(num_cpus, int(limit)))
    section = Section("threads", {"torch": num_threads, "cores at hand": num_cpus})
    section.facts["CPU limit of the cgroup"] = "none" if limit is None else f"{limit:.1f} CPUs"
    section.facts.update({name: os.environ.get(name, "not set") for name in THREAD_VARIABLES})
    if num_threads > num_cpus and limit is None:
        section.warn(
            f"torch takes {num_threads} threads for {num_cpus} cores; they wait for each other",
            f"set OMP_NUM_THREADS={num_cpus}",
        )
    elif num_threads < num_cpus:
        section.warn(
            f"torch takes {num_threads} of {num_cpus} cores",
            f"unset OMP_NUM_THREADS, or set it to {num_cpus}",
        )
    _compare_with_load(section, num_threads, limit)
    return section


def _compare_with_load(section: Section, num_threads: int, limit: float | None) -> None:
    """Report how busy other processes keep the cores, and how many threads an engine would use."""
    from sagellm.engines.forward.free_cores import cores_of_others, fixed_by, free_threads, read_cpu_time

    before = read_cpu_time()
    time.sleep(_LOAD_WINDOW_S)
    after = read_cpu_time()
    if before is None or after is None:
        section.facts["threads of a step"] = f"{num_threads}; how busy the CPUs are is not known here"
        return
    num_cpus, others = len(os.sched_getaffinity(0)), cores_of_others(before, after)
    section.facts["load average"] = f"{os.getloadavg()[0]:.1f} for {num_cpus} CPUs, over the last minute"
    section.facts["CPUs kept busy by others"] = f"{others:.1f} of {num_cpus}, now"
    fixed, num_free = fixed_by(os.environ), free_threads(num_cpus, others, limit)
    if fixed is not None:
        section.facts["threads of a step"] = f"{num_threads}, fixed by {fixed}"
    else:
        section.facts["threads of a step"] = f"{min(num_threads, num_free)}, as many as there are free cores"
    if num_free < num_threads and num_free < free_threads(num_cpus, 0.0, limit):
        section.warn(
            f"other programs keep {others:.1f} of {num_cpus} CPUs busy; "
            + (
                f"an engine uses {num_free} of {num_threads} threads meanwhile, and is slower"
                if fixed is None
                else f"the {num_threads} threads that {fixed} asks for will wait for each other"
            ),
            "end them, or give the engine CPUs of its own (taskset, or a container's cpuset)"
            + ("" if fixed is None else f", or unset {fixed}"),
        )


def examine_products(context: ExaminationContext) -> Section:
    """Say whether this CPU multiplies 16-bit weights faster directly or widened to float32, measured once."""
    import torch

    from sagellm.accel.kept_rates import rates_file
    from sagellm.accel.widening import widening_for

    section = Section("products")
    for dtype in (torch.bfloat16, torch.float16):
        found = widening_for(dtype, torch.device("cpu"))
        name = str(dtype).removeprefix("torch.")
        rates = f"{found.direct_gflops:.0f} GFLOP/s per core, widened to float32 {found.widened_gflops:.0f}"
        used = "never" if found.min_rows is None else f"from {found.min_rows} rows on"
        section.facts[f"{name} weights"] = f"{rates}; widened {used}"
    section.facts["rates are kept in"] = str(rates_file() or "no file")
    return section


def examine_native(context: ExaminationContext) -> Section:
    """Say which variant of the native library runs here, and why others do not."""
    from sagellm.accel.native import examine

    found = examine()
    section = Section("native", {"variant": found.variant or "none; torch computes"})
    section.facts.update({f"not {name}": reason for name, reason in found.refusals.items()})
    return section


def examine_memory(context: ExaminationContext) -> Section:
    """Look at memory and at the limit that a cgroup sets."""
    section = Section("memory")
    topology = context.topology
    if topology is None:
        return section
    is_limited = topology.memory_limit_bytes < topology.memory_bytes
    section.facts = {
        "installed": format_bytes(topology.memory_bytes),
        "cgroup limit": format_bytes(topology.memory_limit_bytes) if is_limited else "none",
        "available": format_bytes(topology.memory_available_bytes),
    }
    if topology.memory_available_bytes < LITTLE_MEMORY_BYTES:
        section.warn(
            f"{format_bytes(topology.memory_available_bytes)} of memory are available, little for a model",
            "end other programs, or raise the container's memory limit",
        )
    return section


def examine_devices(context: ExaminationContext) -> Section:
    """Look at what torch can run on, and whether the configured device is there."""
    import torch

    has_cuda = torch.cuda.is_available()
    section = Section("devices", {"cpu": "yes", "cuda": f"{torch.version.cuda}" if has_cuda else "no"})
    num_gpus = torch.cuda.device_count() if has_cuda else 0
    for index in range(num_gpus):
        section.facts[f"cuda:{index}"] = _gpu(torch.cuda.get_device_properties(index))
    if not has_cuda and Path("/dev/nvidiactl").exists():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build for CPUs"
        section.warn(
            f"there is an NVIDIA GPU that torch {torch.__version__} cannot use; this torch {built}",
            "install a build of torch for the driver's CUDA version (`nvidia-smi` prints it)",
        )
    wanted = context.config.model.device
    index = int(wanted.partition(":")[2] or 0)
    if wanted.startswith("cuda") and index >= num_gpus:
        section.error(
            f"model.device is {wanted}; there are {num_gpus} CUDA devices",
            "set model.device to auto or cpu, or make the GPU visible (CUDA_VISIBLE_DEVICES)",
        )
    return section


def _gpu(properties: Any) -> str:
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name}, {format_bytes(properties.total_memory)}, compute capability {capability}"
