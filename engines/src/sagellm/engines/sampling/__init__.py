"""From logits to tokens: parameters, penalties, filters, draws, log-probabilities and stops."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.sampling.filters import (
        apply_min_p_filtering as apply_min_p_filtering,
        apply_temperature as apply_temperature,
        apply_top_k_filtering as apply_top_k_filtering,
        apply_top_p_filtering as apply_top_p_filtering,
    )
    from sagellm.engines.sampling.params import SamplingParams as SamplingParams
    from sagellm.engines.sampling.penalties import apply_penalties as apply_penalties
    from sagellm.engines.sampling.rows import (
        BadLogitsError as BadLogitsError,
        LogitsStates as LogitsStates,
        SampledToken as SampledToken,
        SamplingRow as SamplingRow,
    )
    from sagellm.engines.sampling.sampler import Sampler as Sampler
    from sagellm.engines.sampling.stop import (
        Emitted as Emitted,
        StopDecision as StopDecision,
        StopStringMatcher as StopStringMatcher,
        check_stop_conditions as check_stop_conditions,
    )

__all__ = [
    "BadLogitsError",
    "Emitted",
    "LogitsStates",
    "SampledToken",
    "Sampler",
    "SamplingParams",
    "SamplingRow",
    "StopDecision",
    "StopStringMatcher",
    "apply_min_p_filtering",
    "apply_penalties",
    "apply_temperature",
    "apply_top_k_filtering",
    "apply_top_p_filtering",
    "check_stop_conditions",
]

__getattr__ = lazy(
    __name__,
    {
        "BadLogitsError": ".rows",
        "Emitted": ".stop",
        "LogitsStates": ".rows",
        "SampledToken": ".rows",
        "Sampler": ".sampler",
        "SamplingParams": ".params",
        "SamplingRow": ".rows",
        "StopDecision": ".stop",
        "StopStringMatcher": ".stop",
        "apply_min_p_filtering": ".filters",
        "apply_penalties": ".penalties",
        "apply_temperature": ".filters",
        "apply_top_k_filtering": ".filters",
        "apply_top_p_filtering": ".filters",
        "check_stop_conditions": ".stop",
    },
)
