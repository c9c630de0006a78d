"""Optimization passes for schedulers, each a frozen dataclass whose fields are its options."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.kvmgr.scheduler_ir.passes.chunked_prefill import ChunkedPrefillPass as ChunkedPrefillPass
    from sagellm.kvmgr.scheduler_ir.passes.fair_share import FairSharePass as FairSharePass

_MODULE_OF = {
    "ChunkedPrefillPass": ".chunked_prefill",
    "FairSharePass": ".fair_share",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
