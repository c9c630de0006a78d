"""Replays a trace with tiers below the device, and reports how much time they save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sagellm.core import (
    UNNAMED,
    KVMemory,
    KVOffloadProtocol,
    KVTierProtocol,
    PluginRegistry,
    Runtime,
    TraceRequest,
)
from sagellm.core.protocols.kv_offload import FetchRule
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.modules import Modules
from sagellm.lab.simulation.costed_tier import CostedKVTier, NoBytes
from sagellm.lab.simulation.replay import CacheReplay
from sagellm.lab.simulation.step_costs import StepCosts, prefill_work

_BLOCK_BYTES = 1
"""Size of a buffer that is never written; a block's real size is in the costs."""


@dataclass(frozen=True, kw_only=True)
class TierSettings:
    """What is below the device: blocks of each tier, the fastest first, and who decides."""

    num_blocks: Mapping[str, int]
    rule: FetchRule = "cheaper"
    thresholds: Mapping[str, float] = field(default_factory=dict)  # the classifier's


@dataclass(kw_only=True)
class SavedTime:
    """What requests of a replay would have taken, and what they took, in seconds.

    `saved_s` is the compute time avoided − the fetch time spent; `share` is relative to computing everything.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_saved_tokens: int = 0
    num_fetched_blocks: int = 0
    num_computed_instead: int = 0
    num_lost_blocks: int = 0
    all_s: float = 0.0
    not_computed_s: float = 0.0
    fetch_s: float = 0.0

    @property
    def saved_s(self) -> float:
        """Seconds that were neither computed nor spent on fetching."""
        return self.not_computed_s - self.fetch_s

    @property
    def share(self) -> float:
        """Return the time saved ÷ the time that computing everything takes."""
        return self.saved_s / self.all_s if self.all_s else 0.0

    @property
    def token_saving(self) -> float:
        """Return prompt tokens not computed ÷ prompt tokens."""
        return self.num_saved_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


class TierReplay:
    """One device with tiers below it; each call of `run` measures the savings of one part of a trace."""

    def __init__(
        self,
        config: EngineConfig,
        costs: StepCosts,
        settings: TierSettings,
        registry: PluginRegistry | None = None,
    ) -> None:
        self._costs, self._settings = costs, settings
        self._block_size = config.kv.block_size
        self.replay = CacheReplay(config, registry, make_offload=self._make_offload)

    def run(self, requests: Iterable[TraceRequest]) -> SavedTime:
        """Replay requests after those of earlier calls, and return what these save."""
        offload, costs = self._offload, self._costs
        before = offload.metrics()
        found = SavedTime()
        for request in requests:
            one = self.replay.take(request)
            num_tokens, num_saved = one.num_prompt_tokens, one.num_saved_tokens
            num_computed = num_tokens - num_saved
            num_pairs = prefill_work(num_computed, num_saved).num_pairs
            compute_ns = round(costs.prefill_ns(num_computed, num_saved))
            offload.measure_prefill(num_computed, num_pairs, compute_ns)
            found.num_requests += 1
            found.num_prompt_tokens += num_tokens
            found.num_saved_tokens += num_saved
            found.all_s += costs.prefill_ns(num_tokens) / 1e9
            found.not_computed_s += costs.prefill_ns(num_saved) / 1e9
        after = offload.metrics()
        found.num_fetched_blocks = after.num_fetched_blocks - before.num_fetched_blocks
        found.num_computed_instead = after.num_computed_instead - before.num_computed_instead
        found.num_lost_blocks = after.num_lost_blocks - before.num_lost_blocks
        found.fetch_s = (after.expected_fetch_ns - before.expected_fetch_ns) / 1e9
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError if pool, cache or tiers contradict themselves."""
        self.replay.kv.manager.check_integrity()
        self._offload.check_integrity()

    def _make_offload(self, modules: Modules, runtime: Runtime) -> KVOffloadProtocol:
        tiers: dict[str, KVTierProtocol] = {
            name: CostedKVTier(num_blocks, get_ns=self._costs.fetch_ns(name, self._block_size))
            for name, num_blocks in self._settings.num_blocks.items()
        }
        options = {"rule": self._settings.rule, "clock": runtime.clock, **self._settings.thresholds}
        memory = KVMemory(NoBytes(), self._block_size, _BLOCK_BYTES, UNNAMED)
        made: KVOffloadProtocol = modules.make("kv_offload", "tiered", memory, tiers=tiers, **options)
        self._offload = made
        return made
