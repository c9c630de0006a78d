"""How a row's token is sampled."""

from __future__ import annotations

from typing import Literal, NamedTuple

from sagellm.engines.sampling.params import SamplingParams

_WIDTHS = (32, 64, 128, 256, 512)
_USUAL_WIDTH = 64
_SPARE = 8
"""Candidates beyond k, so that logits equal to the k-th rarely reach beyond them."""


class SamplingMethod(NamedTuple):
    """Rows of one method are sampled together.

    greedy    the largest logit
    whole     a draw from all tokens
    bounded   a draw from candidates, because min-p or top-k keeps few tokens
    nucleus   a draw from candidates, for which top-p needs the mass of all tokens
    filtered  the filters one after another on all tokens, if the candidates do not decide
    """

    name: Literal["greedy", "whole", "bounded", "nucleus", "filtered"]
    num_candidates: int = 0


def choose_method(params: SamplingParams, vocab_size: int, *, exhaustive: bool) -> SamplingMethod:
    """Choose by the parameters alone: the rest of the batch must not matter."""
    if params.is_greedy:
        return SamplingMethod("greedy")
    has_top_k = 0 < params.top_k < vocab_size
    if not has_top_k and not params.min_p and params.top_p >= 1.0:
        return SamplingMethod("whole")
    needed = params.top_k + _SPARE if has_top_k else _USUAL_WIDTH
    if exhaustive or needed > _WIDTHS[-1]:
        return SamplingMethod("filtered")
    width = next(width for width in _WIDTHS if width >= needed)
    return SamplingMethod("bounded" if has_top_k or params.min_p else "nucleus", width)
