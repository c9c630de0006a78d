"""Tokens chosen by a kernel: one call for all rows, each with its settings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from sagellm.core import UnsupportedModelError
from sagellm.engines.loading.device_and_dtype import device_type
from sagellm.engines.sampling.mass_cut import dropped_share
from sagellm.engines.sampling.params import SamplingParams

if TYPE_CHECKING:
    import torch

Ints = npt.NDArray[np.int32]

Logits: TypeAlias = "torch.Tensor | npt.NDArray[np.float32]"
"""Logits (rows, vocab) as the forward backend returned them: an array of the host, or a tensor."""

NO_ROWS: Ints = np.empty(0, np.int32)
NO_OFFSETS: npt.NDArray[np.int64] = np.zeros(1, np.int64)
NO_LOGPROBS: npt.NDArray[np.float64] = np.empty((0, 2))

EDIT = np.dtype([("token", np.int32), ("factor", np.float32), ("addend", np.float32)])
"""A change of one logit: if negative it is multiplied by the factor, else divided by it; then the addend is
added. -inf forbids the token."""

Edits = npt.NDArray[np.void]
"""Records of `EDIT`, made one after the other."""


_RAW = np.dtype((np.void, EDIT.itemsize))


def joined(edits: Sequence[Edits]) -> Edits:
    """Return edits one after another; a quarter of the time that numpy takes for records."""
    whole: Edits = np.concatenate([each.view(_RAW) for each in edits]).view(EDIT)
    return whole


@dataclass(slots=True, kw_only=True)
class Details:
    """What some rows of a draw ask for beside a token; None: no row does."""

    places: Ints | None = None  # (rows,) which row of the logits each draws from; None: one after the other
    replaced: npt.NDArray[np.float32] | None = None  # (any, vocab) logits to draw from instead
    replaced_rows: Ints = field(default_factory=lambda: NO_ROWS)  # (rows,) which of those; -1: its own
    masks: npt.NDArray[np.uint32] | None = None  # (any, words) as in `TokenMasks`
    mask_rows: Ints = field(default_factory=lambda: NO_ROWS)  # (rows,) which of those; -1: none
    edits: Edits | None = None
    edit_offsets: npt.NDArray[np.int64] = field(default_factory=lambda: NO_OFFSETS)  # (rows + 1,)
    num_top: Ints | None = None  # (rows,) likeliest tokens with log-probabilities; -1: none at all
    logprobs: npt.NDArray[np.float64] = field(default_factory=lambda: NO_LOGPROBS)
    """Where they are written (rows, columns), as by `token_logprobs`."""


@runtime_checkable
class HostDraw(Protocol):
    """Draws on the host."""

    def choose(
        self,
        logits: Logits,
        settings: npt.NDArray[np.float64],
        keys: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.uint64],
        details: Details | None = None,
    ) -> npt.NDArray[np.int64]:
        """Return tokens (rows,), -1 for rows that are not distributions, of logits (rows, vocab).

        Settings are (rows, 5): temperature, min-p, top-k, 1 - top-p, and room for a number; 0, 0, 0 and a
        negative number switch them off. The random numbers are those of `random.numbers_of`. The logits stay
        as they are.
        """


IN_PROMPT = 1 << 30
"""Added to the count of a token that occurs in a prompt whose tokens are penalised."""


class DeviceChanges(NamedTuple):
    """What changes rows of logits on a device: penalties, then edits; and masks. All of it lies there.

    The columns of `plan` are a row of the logits; its row of the counts; its row of the masks; where its
    drafts begin, and their number; repetition, frequency and presence penalty. A row of -1 is none. The
    drafts count as tokens of the output.
    """

    plan: torch.Tensor  # (changed, 8) float64
    counts: torch.Tensor  # (any, vocab) int32 of tokens in outputs, and IN_PROMPT
    drafts: torch.Tensor  # (any,) int64
    masks: torch.Tensor  # (any, words) int32, as in `TokenMasks`
    edited: torch.Tensor  # (edits,) int64: row · vocab + token, after penalties
    addends: torch.Tensor  # (edits,) float32; -inf forbids, and may stand twice, any other once


class DeviceDraw(Protocol):
    """Draws on a device, and waits for nothing there."""

    def __call__(self, logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
        """Return what a `HostDraw` does, as (rows,) int64 on the device.

        The last column of the settings, (rows, 5) float64, is a uniform number.
        """

    def logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, num_top: int
    ) -> torch.Tensor:
        """Return (scored, 2 + 2 * num_top) float64 on the device, as `token_logprobs` does.

        `rows` (2, scored) int64 says where the logits (any, vocab), float32 and contiguous, of each lie, and
        where its token (any,) int64. What belongs to a token of -1 is unspecified.
        """

    def count(
        self, counts: torch.Tensor, begins: torch.Tensor, sources: torch.Tensor, last: torch.Tensor
    ) -> None:
        """Add to `counts` (any, vocab) int32, in rows that begin at `begins` (tokens,) int64.

        `sources` (tokens,) int64 are tokens, or -1 - the place in `last` (any,) int64 where one is.
        """

    def change(self, logits: torch.Tensor, changes: DeviceChanges) -> None:
        """Change rows of logits (rows, vocab), float32 and contiguous, in place."""


Filters = tuple[float, float, int, float]
"""A row's settings, but the number."""


def device_draw(device: str | torch.device) -> HostDraw | DeviceDraw | None:
    """Return the kernel that draws on a device; None: the sampler draws with torch alone."""
    kind = device_type(device)
    if kind == "cuda":
        try:
            from sagellm.accel.cuda.sampling import TritonDraw
        except ImportError:  # without triton
            return None
        return TritonDraw()
    return _native_draw() if kind == "cpu" else None


def _native_draw() -> HostDraw | None:
    from sagellm.accel.native import NativeDraw

    try:
        return NativeDraw()
    except UnsupportedModelError:  # not built, or for another CPU
        return None


def filters_of(params: SamplingParams) -> Filters:
    """Return a row's settings, without its number."""
    temperature = 0.0 if params.is_greedy else params.temperature
    return temperature, params.min_p, params.top_k, dropped_share(params.top_p)


def edits_of(token_ids: Collection[int], addends: npt.ArrayLike = -np.inf) -> Edits:
    """Return edits that add to the logits of tokens, or forbid them."""
    edits = np.empty(len(token_ids), EDIT)
    edits["token"] = np.fromiter(token_ids, np.int32, len(token_ids))
    edits["factor"], edits["addend"] = 1.0, addends
    return edits
