"""What became of an engine's drafts. Imports no numpy: who asks a running engine needs this alone."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class SpeculationMetrics:
    """What became of drafts, by their tokens, since the start."""

    proposer: str = ""
    num_steps: int = 0  # with drafts
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_place: list[int] = field(default_factory=list)  # drafts whose token there was accepted
    propose_ns: int = 0  # all time in the proposer
    failure: str = ""  # why it is not asked any more

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens that a draft gives: those accepted, and the one after them; None without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None
