"""Chooses one token per row from a batch of logits. Imports torch when it first samples or scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sagellm.core.plugins.failure import contained, plugin_failure
from sagellm.core.protocols.engine import PromptScores
from sagellm.core.protocols.logits_processor import ExtraArg, LogitsProcessorProtocol, LogitsRequest
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.sampling.rows import LogitsStates, SampledToken, SamplingRow
from sagellm.engines.sampling.stop import check_stop_conditions

if TYPE_CHECKING:
    import torch

    from sagellm.engines.sampling.torch_sampler import TorchSampler


class Sampler:
    """Greedy choice and exact random draws, vectorised over the rows of a batch.

    Penalties come first, then the logits processors in their order, temperature, min-p, top-k and top-p.
    A row's token depends only on its logits, parameters, seed and position. Log-probabilities are those of
    the unmodified logits. Never sorts a vocabulary and reads as little of it as the parameters allow. Keeps
    scratch space between calls, so it is not thread-safe.

    The reference for the kernels that draw, and what draws on a device that has none. A kernel chooses the
    same token, unless the row's random number is within a few float32 roundings of the border between two.
    """

    check_stop_conditions = staticmethod(check_stop_conditions)

    def __init__(
        self,
        processors: Iterable[LogitsProcessorProtocol[Any]] = (),
        extra_args: Iterable[ExtraArg] = (),
        *,
        labels: Iterable[str] = (),
    ) -> None:
        self.processors = tuple(processors)
        self._labels = tuple(labels) or tuple(type(each).__name__ for each in self.processors)
        self.extra_args = tuple(extra_args)  # the entries of a request's `extra_args` that they read

    @staticmethod
    def apply_penalties(
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        prompt_token_ids: Sequence[Sequence[int]],
        output_token_ids: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Do what `penalties.apply_penalties` does."""
        from sagellm.engines.sampling.penalties import apply_penalties

        return apply_penalties(logits, params, prompt_token_ids, output_token_ids)

    def start(self, request: LogitsRequest) -> LogitsStates:
        """Return the processors' states for a sequence, once, before it is first sampled.

        Raises PluginError, which names the processor, if one fails.
        """
        states: list[tuple[int, Any]] = []
        for which, each in enumerate(self.processors):
            with contained() as failure:
                state = each.start(request)
            if (error := failure.error) is not None:
                raise plugin_failure(self._labels[which], "start()", error) from error
            if state is not None:
                states.append((which, state))
        return tuple(states)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Return one token for each row of logits (rows, vocab), float32 on any device, left unchanged.

        Synchronizes with the device once; twice if a filter keeps more than the most likely few dozen or
        hundred tokens. Raises BadLogitsError, which names the rows, for NaN, infinity or a row without any
        finite logit, and PluginError, which names the processor, if one fails; then no token of the batch is
        returned.
        """
        return self._torch.sample(logits, rows)

    def score(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> PromptScores:
        """Return the log-probabilities of given tokens, one per row of logits (rows, vocab).

        Raises BadLogitsError, which names the rows, for NaN or infinity.
        """
        return self._torch.score(logits, token_ids, num_top)

    def changed(self, logits: torch.Tensor, part: list[int], members: Sequence[SamplingRow]) -> torch.Tensor:
        """Return a copy of some rows of the logits as they are filtered and drawn from.

        Raises PluginError, which names the processor, if one fails.
        """
        return self._torch.changed(logits, part, members)

    @cached_property
    def _torch(self) -> TorchSampler:
        from sagellm.engines.sampling.torch_sampler import TorchSampler

        return TorchSampler(self.processors, self._labels)
