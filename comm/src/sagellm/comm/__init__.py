"""The topology of this machine: CPUs, NUMA nodes, GPUs, network."""

from sagellm.core._lazy import lazy

__version__ = "0.1.0"
__all__: list[str] = []

__getattr__ = lazy(__name__, {})
