"""Chooses one token a row from a batch of logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sagellm.core.errors import EngineError
from sagellm.core.tokens import TokenIds
from sagellm.engines.sampling import filters
from sagellm.engines.sampling.candidates import FilterSettings, draw_candidate, keep
from sagellm.engines.sampling.inverse_cdf import block_masses, draw, padded, softmax_into
from sagellm.engines.sampling.logprobs import token_logprobs
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.sampling.penalties import apply_penalties
from sagellm.engines.sampling.random import uniforms
from sagellm.engines.sampling.selection import Candidates, first_argmax, largest
from sagellm.engines.sampling.stop import check_stop_conditions
from sagellm.engines.sampling.way import Way, choose_way

_CHUNK_ELEMENTS = 1 << 23
"""Rows are sampled in chunks of so many logits (32 MiB), which bounds the scratch space."""


@dataclass(slots=True)
class SamplingRow:
    """What the sampler has to know about the sequence of one row of logits."""

    params: SamplingParams
    seed: int
    position: int  # output tokens so far; the counter of the random numbers
    prompt_token_ids: TokenIds
    output_token_ids: Sequence[int]
    suppressed_token_ids: tuple[int, ...] = ()  # stop tokens, while min_tokens is not reached


class SampledToken(NamedTuple):
    """A token and, where asked for, log-probabilities: its own and the most likely ones, best first."""

    token_id: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None


class BadLogitsError(EngineError):
    """No token can be drawn from some rows; `rows` are their indices. The others are sound."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        shown = ", ".join(map(str, self.rows[:8])) + (", …" if len(self.rows) > 8 else "")
        super().__init__(
            f"no token can be chosen from row {shown} of the logits: a logit is NaN or infinite, or all "
            "of them are masked"
        )


class _Drawn(NamedTuple):
    """One result a row; `check` is finite where the row is a distribution."""

    token_ids: torch.Tensor
    check: torch.Tensor
    is_decided: torch.Tensor | Literal[True] = True


class _Chunk(NamedTuple):
    scores: torch.Tensor  # (rows, vocab) after penalties; not to be written
    params: list[SamplingParams]
    uniform: torch.Tensor  # (rows, 1) float64

    def setting(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return one number a row as (rows, 1) on the device."""
        return torch.tensor(values, dtype=dtype).to(self.scores.device)[:, None]

    def temperature(self) -> torch.Tensor:
        """Return the temperatures, (rows, 1)."""
        return self.setting([each.temperature for each in self.params])


class Sampler:
    """Greedy choice and exact random draws, vectorised over the rows of a batch.

    Penalties come first, then temperature, min-p, top-k and top-p. A row's token depends on its logits,
    its parameters, its seed and its position alone. Never sorts a vocabulary and reads as little of it
    as the parameters allow. Keeps scratch space between calls, so one thread at a time.
    """

    apply_penalties = staticmethod(apply_penalties)
    check_stop_conditions = staticmethod(check_stop_conditions)

    def __init__(self) -> None:
        self._space = torch.empty(0)
        self._ways = {
            "greedy": self._greedy,
            "whole": self._whole,
            "bounded": self._bounded,
            "nucleus": self._nucleus,
            "filtered": self._filtered,
        }

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Return one token for each row of logits (rows, vocab), float32 on any device, left unchanged.

        The device is waited for once; a second time where a filter keeps more than the most likely few
        dozen or hundred tokens. Raises BadLogitsError, which names the rows, for NaN, infinity or a row
        without any finite logit; no token of the batch is then returned.
        """
        if logits.ndim != 2 or len(rows) != logits.shape[0]:
            raise EngineError(f"logits of shape {tuple(logits.shape)} for {len(rows)} rows to sample")
        if not rows:
            return []
        logits = logits.float().contiguous()
        wanted = [row.params.logprobs for row in rows]
        num_top = min(max(-1 if each is None else each for each in wanted), logits.shape[1])
        results = self._run(logits, rows, num_top, exhaustive=False)
        bad = np.flatnonzero(~np.isfinite(results[:, 1]))
        if bad.size:
            raise BadLogitsError(bad.tolist())
        undecided = np.flatnonzero(results[:, 2] == 0.0)
        if undecided.size:
            again = [rows[row] for row in undecided.tolist()]
            results[undecided] = self._run(
                _select(logits, undecided.tolist()), again, num_top, exhaustive=True
            )
        return [_sampled_token(result, count) for result, count in zip(results, wanted, strict=True)]

    def _run(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], num_top: int, *, exhaustive: bool
    ) -> npt.NDArray[np.float64]:
        """Return (rows, 3 or more): token, check, whether decided, then log-probabilities."""
        ways: dict[Way, list[int]] = {}
        for index, row in enumerate(rows):
            ways.setdefault(choose_way(row.params, logits.shape[1], exhaustive=exhaustive), []).append(index)
        results = logits.new_zeros((len(rows), 4 + 2 * num_top if num_top >= 0 else 3), dtype=torch.float64)
        for way, members in ways.items():
            for part in self._parts(members, logits):
                drawn = self._ways[way.name](_chunk(logits, part, rows), way.num_candidates)
                for column, values in enumerate(drawn):
                    results[part, column] = torch.as_tensor(values, dtype=torch.float64, device=logits.device)
        reported = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        for part in self._parts(reported, logits):
            part_logits = _select(logits, part)
            # A row that is no distribution may have any number for its token.
            token_ids = results[part, 0].long().clamp(max=logits.shape[1] - 1)
            results[part, 3:] = token_logprobs(part_logits, token_ids, num_top, self._scratch(part_logits))
        return results.cpu().numpy()

    def _parts(self, members: list[int], logits: torch.Tensor) -> Iterator[list[int]]:
        step = max(1, _CHUNK_ELEMENTS // padded(logits.shape[1]))
        for start in range(0, len(members), step):
            yield members[start : start + step]

    def _scratch(self, scores: torch.Tensor) -> torch.Tensor:
        needed = scores.shape[0] * padded(scores.shape[1])
        if self._space.device != scores.device or self._space.numel() < needed:
            self._space = scores.new_empty(needed)
        return self._space

    def _greedy(self, chunk: _Chunk, _: int) -> _Drawn:
        values, token_ids = first_argmax(chunk.scores)
        return _Drawn(token_ids, values)

    def _whole(self, chunk: _Chunk, _: int) -> _Drawn:
        return _Drawn(*draw(self._probabilities(chunk), chunk.uniform))

    def _bounded(self, chunk: _Chunk, num_candidates: int) -> _Drawn:
        return _draw_kept(chunk, largest(chunk.scores, num_candidates), None)

    def _nucleus(self, chunk: _Chunk, num_candidates: int) -> _Drawn:
        candidates = largest(chunk.scores, num_candidates)
        probabilities = self._probabilities(chunk)
        total = block_masses(probabilities).sum(1, keepdim=True)
        return _draw_kept(chunk, candidates, total / probabilities.gather(1, candidates.ids[:, :1]))

    def _probabilities(self, chunk: _Chunk) -> torch.Tensor:
        is_scaled = any(each.temperature != 1.0 for each in chunk.params)
        scratch = self._scratch(chunk.scores)
        return softmax_into(scratch, chunk.scores, chunk.temperature() if is_scaled else None)

    def _filtered(self, chunk: _Chunk, _: int) -> _Drawn:
        params = chunk.params
        scores = filters.apply_temperature(chunk.scores, torch.tensor([each.temperature for each in params]))
        scores = filters.apply_min_p_filtering(scores, torch.tensor([each.min_p for each in params]))
        scores = filters.apply_top_k_filtering(scores, torch.tensor([each.top_k for each in params]))
        top_p = torch.tensor([each.top_p for each in params], dtype=torch.float64)
        scores = filters.apply_top_p_filtering(scores, top_p)
        probabilities = softmax_into(self._scratch(scores), scores)
        return _Drawn(*draw(probabilities, chunk.uniform))


def _chunk(logits: torch.Tensor, part: list[int], rows: Sequence[SamplingRow]) -> _Chunk:
    """Select rows of the logits and apply what changes single tokens; copies only where it has to."""
    members = [rows[index] for index in part]
    params = [row.params for row in members]
    scores = _select(logits, part)
    masked = [
        (place, token)
        for place, row in enumerate(members)
        for token in row.suppressed_token_ids
        if token < logits.shape[1]
    ]
    if masked or any(each.has_penalties for each in params):
        scores = scores.clone()
        prompts = [row.prompt_token_ids for row in members]
        apply_penalties(scores, params, prompts, [row.output_token_ids for row in members])
        if masked:
            places, tokens = torch.tensor(masked).to(scores.device).T
            scores[places, tokens] = -torch.inf
    random = [row for row in members if not row.params.is_greedy]
    numbers = (
        uniforms([row.seed for row in random], [row.position for row in random]) if random else np.empty(0)
    )
    return _Chunk(scores, params, torch.from_numpy(numbers).to(logits.device)[:, None])


def _select(logits: torch.Tensor, part: list[int]) -> torch.Tensor:
    """Return rows of the logits, as a view where they are neighbours."""
    if part[-1] - part[0] == len(part) - 1:
        return logits[part[0] : part[-1] + 1]
    return logits[part]


def _draw_kept(chunk: _Chunk, candidates: Candidates, mass: torch.Tensor | None) -> _Drawn:
    vocab_size = chunk.scores.shape[1]
    settings = FilterSettings(
        temperature=chunk.temperature(),
        min_p=chunk.setting([each.min_p for each in chunk.params]),
        top_k=chunk.setting(
            [each.top_k if each.top_k < vocab_size else 0 for each in chunk.params], torch.int64
        ),
        dropped_share=chunk.setting(
            [filters.dropped_share(each.top_p) for each in chunk.params], torch.float64
        ),
    )
    kept = keep(candidates, settings, vocab_size=vocab_size, mass=mass)
    token_ids = draw_candidate(candidates, kept.weights, chunk.uniform)
    largest_scaled = candidates.values[:, 0] / settings.temperature[:, 0]
    return _Drawn(token_ids, largest_scaled, kept.is_decided)


def _sampled_token(result: npt.NDArray[np.float64], num_top: int | None) -> SampledToken:
    token_id = int(result[0])
    if num_top is None:
        return SampledToken(token_id)
    width = (len(result) - 4) // 2  # of the row that asked for most
    num_top = min(num_top, width)
    top = zip(result[4 + width : 4 + width + num_top], result[4 : 4 + num_top], strict=True)
    best_first = sorted(
        ((int(token), float(value)) for token, value in top), key=lambda entry: (-entry[1], entry[0])
    )
    return SampledToken(token_id, float(result[3]), best_first)
