"""The pass `shortest` under the old name."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

from sagellm.kvmgr.scheduler_ir.passes.shortest import ShortestFirstPass


@dataclass(frozen=True)
class LifetimeAwarePass(ShortestFirstPass):
    """`ShortestFirstPass`, which it is called now; warns of each use. `untrusted` has no effect any more."""

    name = "lifetime"
    untrusted: Literal["max", "mean"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        told = "LifetimeAwarePass (lifetime) is ShortestFirstPass (shortest) now; the old name goes with 0.3"
        warnings.warn(told, DeprecationWarning, stacklevel=3)
