"""What a step computes, and how long that takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from sagellm.core.errors import InvalidInputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int32]


class StepWork(NamedTuple):
    """The amounts that a step's duration depends on.

    A row that computes tokens s … e of its sequence adds 1 sequence, e - s tokens, e tokens of KV read, and
    (e - s) · (s + e) ÷ 2 pairs of a token and a token that it attends to. If it computes several tokens, it
    also adds 1 prefill, which stands for what a prompt costs whatever its length, such as admission.
    """

    num_tokens: int
    num_seqs: int
    num_kv_tokens: int
    num_pairs: int
    num_prefills: int = 0

    @classmethod
    def of(cls, starts: Ints, num_new: Ints) -> Self:
        """Return the work of rows that compute `num_new` tokens after their first `starts`, each (rows,)."""
        ends = starts + num_new
        num_pairs = int(num_new.astype("int64").dot(starts + ends)) // 2
        num_prefills = int((num_new > 1).sum())
        return cls(int(num_new.sum()), len(ends), int(ends.sum(dtype="int64")), num_pairs, num_prefills)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A linear model of a step's duration in nanoseconds: base + Σ coefficient · amount."""

    base_ns: float = 0.0
    token_ns: float = 0.0
    seq_ns: float = 0.0
    kv_token_ns: float = 0.0
    pair_ns: float = 0.0
    prefill_ns: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < float("inf"):
                raise InvalidInputError(f"{name} is {value}; it must be a number of at least 0")

    @classmethod
    def of(cls, values: dict[str, float]) -> Self:
        """Return the cost model in a mapping. Raises InvalidInputError for an unknown key or a bad value."""
        known = set(asdict(cls()))
        if unknown := sorted(set(values) - known):
            raise InvalidInputError(f"a step cost has no {unknown[0]!r}; it has {', '.join(sorted(known))}")
        return cls(**{name: float(value) for name, value in values.items()})

    def scaled(self, factor: float) -> StepCost:
        """Return the cost model of steps that take `factor` times as long."""
        return StepCost(**{name: factor * value for name, value in vars(self).items()})

    def predict_ns(self, work: StepWork) -> float:
        """Return the predicted duration of a step."""
        return (
            self.base_ns
            + self.token_ns * work.num_tokens
            + self.seq_ns * work.num_seqs
            + self.kv_token_ns * work.num_kv_tokens
            + self.pair_ns * work.num_pairs
            + self.prefill_ns * work.num_prefills
        )


@dataclass(frozen=True, kw_only=True)
class StepCostMetrics:
    """The fitted cost of an engine's steps, and how long a step may take while others decode or wait."""

    cost: StepCost | None = None  # None before the first fit
    step_target_ms: float | None = None
