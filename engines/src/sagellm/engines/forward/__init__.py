"""Running a step's forward pass."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.forward.memory import available_memory_bytes as available_memory_bytes
    from sagellm.engines.forward.torch_backend import TorchForwardBackend as TorchForwardBackend

__all__ = ["TorchForwardBackend", "available_memory_bytes"]

__getattr__ = lazy(__name__, {"TorchForwardBackend": ".torch_backend", "available_memory_bytes": ".memory"})
