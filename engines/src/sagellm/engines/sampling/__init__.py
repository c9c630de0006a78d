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
    from sagellm.engines.sampling.sampler import Sampler as Sampler
    from sagellm.engines.sampling.stop import check_stop_conditions as check_stop_conditions

_MODULE_OF = {
    "Sampler": ".sampler",
    "SamplingParams": ".params",
    "apply_min_p_filtering": ".filters",
    "apply_penalties": ".penalties",
    "apply_temperature": ".filters",
    "apply_top_k_filtering": ".filters",
    "apply_top_p_filtering": ".filters",
    "check_stop_conditions": ".stop",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
