"""How an engine's answers compare with the reference: what differs, and what that means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TIE_MARGINS = {"float32": 0.001, "float16": 0.05, "bfloat16": 0.25}
"""By number format: two tokens whose log-probabilities are closer than this are as good as equally likely.

Right implementations that add in different orders differ in the last bits of the logits, which reach about 30
and have 23, 10 or 7 bits behind the leading one; what the layers before have rounded adds to that.
"""

Verdict = Literal["equal", "ties", "different"]
_WORST_FIRST: tuple[Verdict, ...] = ("different", "ties")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A place where the reference would have taken another token; its log-probabilities of both."""

    place: int  # in the answer, from 0
    token_id: int
    reference_token_id: int
    logprob: float
    reference_logprob: float

    @property
    def margin(self) -> float:
        """How much more likely the reference's token is, as a difference of log-probabilities."""
        return self.reference_logprob - self.logprob


@dataclass(frozen=True, kw_only=True)
class ComparedPrompt:
    """One prompt, its answer, and where that differs."""

    text: str
    num_prompt_tokens: int
    token_ids: list[int]
    differences: list[Difference]

    def decisive(self, tie_margin: float) -> Difference | None:
        """Return the first difference that is more than a tie, else the first one, else None."""
        real = (each for each in self.differences if each.margin >= tie_margin)
        return next(real, self.differences[0] if self.differences else None)

    def verdict(self, tie_margin: float) -> Verdict:
        """Say whether all tokens are equal, or differ in ties alone."""
        decisive = self.decisive(tie_margin)
        if decisive is None:
            return "equal"
        return "ties" if decisive.margin < tie_margin else "different"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The comparison of all answers. With `is_lossy` the engine rounded more than the reference did."""

    prompts: list[ComparedPrompt]
    tie_margin: float
    is_lossy: bool

    @property
    def verdicts(self) -> list[Verdict]:
        """That of each prompt."""
        return [each.verdict(self.tie_margin) for each in self.prompts]

    @property
    def verdict(self) -> Verdict:
        """The worst of all prompts."""
        return next((each for each in _WORST_FIRST if each in self.verdicts), "equal")

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(each.token_ids) for each in self.prompts)

    @property
    def agreement_share(self) -> float:
        """Share of the tokens that the reference would have taken too."""
        return 1 - sum(len(each.differences) for each in self.prompts) / self.num_tokens

    @property
    def mean_margin(self) -> float:
        """Mean, over all tokens, of what they are less likely than the reference's: 0 where both agree."""
        margins = (one.margin for each in self.prompts for one in each.differences)
        return sum(margins) / self.num_tokens
