"""Admits first what the prefix cache has most of: longest prefix match, as in SGLang (arXiv 2312.07104)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from sagellm.core.checks import require_object
from sagellm.core.plugins.options import Limits
from sagellm.core.protocols.prefix_cache import PrefixCacheProtocol
from sagellm.core.protocols.scheduler_ir import ScheduleIR, SchedulerPassProtocol
from sagellm.kvmgr.scheduler_ir.passes.known_hits import KnownHits
from sagellm.kvmgr.scheduler_ir.passes.ordering import by, order_pending, starved_first

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class PrefixCacheAwarePass(SchedulerPassProtocol):
    """Admits first the requests of which most tokens are cached, while they still are.

    By itself that order starves requests with cold prompts, so those that have waited `starvation_s` go
    before all others, the oldest first. A step looks up at most `max_probes` requests, however long the queue
    is: in the cache given here if there is one, locking nothing, else in the engine's.
    """

    name = "prefix-aware"
    prefix_cache: PrefixCacheProtocol | None = field(default=None, compare=False, repr=False)
    starvation_s: Annotated[float, Limits(gt=0)] = 10.0
    max_probes: Annotated[int, Limits(ge=1, le=1 << 20)] = 32

    def __post_init__(self) -> None:
        if self.prefix_cache is not None:
            require_object("prefix_cache", self.prefix_cache, PrefixCacheProtocol, "prefix_cache")
        super().__post_init__()

    def start(self) -> KnownHits:
        """Return a state without known hits."""
        return KnownHits()

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Order admission by cached tokens. O(waiting · log), and at most `max_probes` lookups."""
        if not ir.can_admit or len(ir.pending) < 2:
            return ir
        hits: KnownHits = ir.state
        cached = hits.update(ir, self.max_probes, lambda rows: self._ask(ir, rows))
        return order_pending(
            ir, starved_first(ir.pending, by(-cached, ir.admission), ir.now - self.starvation_s)
        )

    def rests(self, state: object) -> bool:
        """Always: it decides about requests that can be admitted."""
        return True

    def _ask(self, ir: ScheduleIR, rows: npt.NDArray[np.intp]) -> list[int]:
        if self.prefix_cache is None:
            return [hit.num_tokens for hit in ir.hits(rows)]
        requests = [ir.pending[row] for row in rows.tolist()]
        return [
            self.prefix_cache.match_prefix(each.token_ids, each.namespace).match_length for each in requests
        ]
