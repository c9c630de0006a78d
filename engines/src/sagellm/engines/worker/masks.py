"""The masks of a step, by sampled position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sagellm.core import EngineError
from sagellm.core.protocols.step import TokenMasks

Words = npt.NDArray[np.uint32]


def masks_at(
    masks: TokenMasks | None, which: npt.NDArray[np.intp] | None, num_positions: int, vocab_size: int
) -> dict[int, Words]:
    """Return the masks of some of a step's positions, by their places among these; None: of all.

    Raises EngineError for masks of another vocabulary or of positions that a step does not have.
    """
    if masks is None:
        return {}
    num_words, width = -(-vocab_size // 32), masks.words.shape[-1]
    if masks.words.shape != (len(masks.positions), num_words) or masks.words.dtype != np.uint32:
        raise EngineError(
            f"masks have {width} words of {masks.words.dtype} for {len(masks.positions)} positions; a "
            f"vocabulary of {vocab_size} tokens takes {num_words} of uint32 for each"
        )
    positions = masks.positions.tolist()
    if positions and not 0 <= min(positions) <= max(positions) < num_positions:
        raise EngineError(f"masks are for positions {positions}; the step has {num_positions}")
    if which is None:
        return dict(zip(positions, masks.words, strict=True))
    place_of = {position: place for place, position in enumerate(which.tolist())}
    pairs = zip(positions, masks.words, strict=True)
    return {place_of[position]: words for position, words in pairs if position in place_of}
