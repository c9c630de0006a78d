"""Chooses one token per row from a batch of logits, with torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sagellm.core.errors import EngineError
from sagellm.core.protocols.engine import PromptScores
from sagellm.core.protocols.logits_processor import LogitsProcessorProtocol
from sagellm.engines.sampling import filters
from sagellm.engines.sampling.candidates import FilterSettings, draw_candidate, keep
from sagellm.engines.sampling.inverse_cdf import block_masses, draw, padded, softmax_into
from sagellm.engines.sampling.logprobs import packed, width, with_logprobs
from sagellm.engines.sampling.mass_cut import dropped_share
from sagellm.engines.sampling.method import SamplingMethod, choose_method
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.sampling.random import uniforms
from sagellm.engines.sampling.rows import BadLogitsError, SampledToken, SamplingRow
from sagellm.engines.sampling.scores import changed, select
from sagellm.engines.sampling.selection import Candidates, first_argmax, largest
from sagellm.engines.sampling.token_logprobs import token_logprobs

_CHUNK_ELEMENTS = 1 << 23
"""Rows are sampled in chunks of this many logits (32 MiB), which bounds the scratch space."""

_NUM_COLUMNS = 3
"""Columns of the results before log-probabilities."""


class _Drawn(NamedTuple):
    """One result per row; `check` is finite if the row is a distribution."""

    token_ids: torch.Tensor
    check: torch.Tensor
    is_decided: torch.Tensor | Literal[True] = True


class _Chunk(NamedTuple):
    scores: torch.Tensor  # (rows, vocab) after penalties and processors; read-only
    params: list[SamplingParams]
    uniform: torch.Tensor  # (rows, 1) float64

    def setting(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return one number per row as (rows, 1) on the device."""
        return torch.tensor(values, dtype=dtype).to(self.scores.device)[:, None]

    def temperature(self) -> torch.Tensor:
        """Return the temperatures, (rows, 1)."""
        return self.setting([each.temperature for each in self.params])


class TorchSampler:
    """What `Sampler` does with tensors: its docstring holds. `labels` name the processors in errors."""

    def __init__(self, processors: Sequence[LogitsProcessorProtocol[Any]], labels: Sequence[str]) -> None:
        self._processors, self._labels = processors, labels
        self._space = torch.empty(0)
        self._methods = {
            "greedy": self._greedy,
            "whole": self._whole,
            "bounded": self._bounded,
            "nucleus": self._nucleus,
            "filtered": self._filtered,
        }

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Return one token for each row, as `Sampler.sample` says."""
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
                select(logits, undecided.tolist()), again, num_top, exhaustive=True
            )
        return [
            SampledToken(int(result[0]))
            if count is None
            else with_logprobs(int(result[0]), result[_NUM_COLUMNS:], count)
            for result, count in zip(results, wanted, strict=True)
        ]

    def score(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> PromptScores:
        """Return log-probabilities, as `Sampler.score` says."""
        num_top = min(num_top, logits.shape[1])
        targets = torch.tensor(token_ids).to(logits.device)
        results = np.empty((len(token_ids), width(num_top)))
        for part in self._parts(range(len(token_ids)), logits):
            rows = select(logits, part).float()
            results[part] = token_logprobs(rows, targets[part], num_top, self._scratch(rows)).cpu().numpy()
        bad = np.flatnonzero(np.isnan(results[:, 0]))
        if bad.size:
            raise BadLogitsError(bad.tolist())
        return packed(results)

    def _run(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], num_top: int, *, exhaustive: bool
    ) -> npt.NDArray[np.float64]:
        """Return (rows, 3 or more): token, check, whether decided, then log-probabilities."""
        num_columns = _NUM_COLUMNS + (width(num_top) if num_top >= 0 else 0)
        results = logits.new_zeros((len(rows), num_columns), dtype=torch.float64)
        for part, drawn in self._by_methods(logits, rows, exhaustive=exhaustive):
            for column, values in enumerate(drawn):
                results[part, column] = torch.as_tensor(values, dtype=torch.float64, device=logits.device)
        reported = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        for part in self._parts(reported, logits):
            part_logits = select(logits, part)
            # A row that is not a distribution may have any token id.
            token_ids = results[part, 0].long().clamp(max=logits.shape[1] - 1)
            columns = token_logprobs(part_logits, token_ids, num_top, self._scratch(part_logits))
            results[part, _NUM_COLUMNS:] = columns
        return results.cpu().numpy()

    def _by_methods(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], *, exhaustive: bool
    ) -> Iterator[tuple[list[int], _Drawn]]:
        # Changed rows are kept apart, so that no other row is copied.
        methods: dict[tuple[SamplingMethod, bool], list[int]] = {}
        for index, row in enumerate(rows):
            method = choose_method(row.params, logits.shape[1], exhaustive=exhaustive)
            methods.setdefault((method, row.is_changed), []).append(index)
        for (method, is_changed), members in methods.items():
            for part in self._parts(members, logits):
                chunk = self._chunk(logits, part, rows, is_changed=is_changed)
                yield part, self._methods[method.name](chunk, method.num_candidates)

    def changed(self, logits: torch.Tensor, part: list[int], members: Sequence[SamplingRow]) -> torch.Tensor:
        """Return a copy of some rows, as `Sampler.changed` says."""
        return changed(logits, part, members, self._processors, self._labels)

    def _chunk(
        self, logits: torch.Tensor, part: list[int], rows: Sequence[SamplingRow], *, is_changed: bool
    ) -> _Chunk:
        """Select rows of the logits, copying only if necessary."""
        members = [rows[index] for index in part]
        scores = self.changed(logits, part, members) if is_changed else select(logits, part)
        random = [row for row in members if not row.params.is_greedy]
        numbers = (
            uniforms([row.seed for row in random], [row.position for row in random])
            if random
            else np.empty(0)
        )
        uniform = torch.from_numpy(numbers).to(logits.device)[:, None]
        return _Chunk(scores, [row.params for row in members], uniform)

    def _parts(self, members: Sequence[int], logits: torch.Tensor) -> Iterator[list[int]]:
        step = max(1, _CHUNK_ELEMENTS // padded(logits.shape[1]))
        for start in range(0, len(members), step):
            yield list(members[start : start + step])

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


def _draw_kept(chunk: _Chunk, candidates: Candidates, mass: torch.Tensor | None) -> _Drawn:
    vocab_size = chunk.scores.shape[1]
    settings = FilterSettings(
        temperature=chunk.temperature(),
        min_p=chunk.setting([each.min_p for each in chunk.params]),
        top_k=chunk.setting(
            [each.top_k if each.top_k < vocab_size else 0 for each in chunk.params], torch.int64
        ),
        dropped_share=chunk.setting([dropped_share(each.top_p) for each in chunk.params], torch.float64),
    )
    kept = keep(candidates, settings, vocab_size=vocab_size, mass=mass)
    token_ids = draw_candidate(candidates, kept.weights, chunk.uniform)
    largest_scaled = candidates.values[:, 0] / settings.temperature[:, 0]
    return _Drawn(token_ids, largest_scaled, kept.is_decided)
