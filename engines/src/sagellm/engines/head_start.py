"""How a command loads a model with a short way to the first token.

Imports and opening the checkpoint keep one core busy; another one clears the memory of the weights meanwhile.
All of this only saves time: what is not done here, loading does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sagellm.core import SageLLMError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sagellm.engines.config.schema import EngineConfig

_SMALLEST_BYTES = 64 << 20  # smaller weights take less time than a thread saves
_MEMORY_SHARE = 0.5  # of what is available: a backend that does not use the memory takes as much again


@contextmanager
def without_collections() -> Iterator[None]:
    """Leave out collections of garbage in the block, which is for imports and loading: there is none.

    Afterwards what the block made is not searched any more.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def weights_ahead(config: EngineConfig) -> AbstractContextManager[None]:
    """Take memory for the weights of a model on a thread, while the block imports what loads them."""
    with suppress(SageLLMError, OSError):  # loading says what is wrong
        num_bytes = _packed_bytes(config)
        if num_bytes >= _SMALLEST_BYTES and num_bytes <= _MEMORY_SHARE * _available_bytes():
            from sagellm.accel.native.memory import weight_memory

            return weight_memory(num_bytes)
    return nullcontext()


def _available_bytes() -> int:
    from sagellm.comm import read_memory

    return read_memory().available_bytes


def _packed_bytes(config: EngineConfig) -> int:
    """Estimate the memory of weights that the native backend packs as they are stored; 0 for any others."""
    is_native = config.forward.backend.name in ("auto", "native") and not config.forward.backend.options
    is_on_cpu = config.model.device == "cpu" or (
        config.model.device == "auto" and not Path("/dev/nvidiactl").exists()
    )
    if config.engine.name.name != "llm" or config.model.quantization is not None:
        return 0
    if config.model.packed_cache is not None:  # weights are mapped, but for the first time
        return 0
    if not is_native or not is_on_cpu:
        return 0
    from sagellm.accel.native.library import examine
    from sagellm.engines.loading.checkpoint import CONFIG, weight_files
    from sagellm.engines.loading.json_file import read_json
    from sagellm.engines.loading.source import resolve_source

    if examine().variant is None:
        return 0
    path = resolve_source(config.model.name, revision=config.model.revision, offline=True)
    stored = read_json(path / CONFIG)
    own = str(stored.get("dtype") or stored.get("torch_dtype")).removeprefix("torch.")
    if own not in ("bfloat16", "float32") or config.model.dtype not in ("auto", own):
        return 0
    return sum(file.stat().st_size for file in weight_files(path))
