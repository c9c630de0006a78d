"""Token ids for prompts of which only names of blocks are known, so that the real matching code runs."""

from __future__ import annotations

from array import array

from sagellm.core import TokenIds


class StandIns:
    """Makes tokens that agree where the recorded ones do: in blocks of one id, and in parts of blocks.

    Lines are given in the order in which they were written, since a line names blocks of earlier ones.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._tokens_of: dict[int, array[int]] = {}
        self._num_used = 0

    def of(
        self,
        block_ids: tuple[int, ...],
        output_block_ids: tuple[int, ...],
        agreement: tuple[int, int, int] | None,
        num_prompt_tokens: int,
        num_tokens: int,
    ) -> tuple[TokenIds, TokenIds]:
        """Return the tokens of a prompt, and of what a cache keeps behind it.

        `num_tokens` counts both; without output blocks only the prompt's are known.
        """
        size = self._block_tokens
        ids = block_ids
        if output_block_ids:
            ids = (*block_ids[: num_prompt_tokens // size], *output_block_ids)
        place, other, num_common = agreement or (-1, 0, 0)
        made = array("i")
        for at, block_id in enumerate(ids):
            tokens = self._tokens_of.get(block_id)
            if tokens is None:
                common = self._tokens_of.get(other, array("i"))[:num_common] if at == place else array("i")
                self._num_used += 1
                tokens = common + array("i", [self._num_used]) * max(0, size - len(common))
                self._tokens_of[block_id] = tokens
            made += tokens
        data = made.tobytes()
        end = 4 * (num_tokens if output_block_ids else num_prompt_tokens)
        return TokenIds(data[: 4 * num_prompt_tokens]), TokenIds(data[4 * num_prompt_tokens : end])
