"""vLLM's block manager over a trace, for `reference_experiment.py`.

As in our replay, a prompt is matched, given blocks, cached and let go at once.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator
from typing import Any

import vllm
from rounds import answer
from vllm_manager import Requests, make_manager


def replay(path: str, block_size: int, capacity: int) -> Iterator[dict[str, Any]]:
    """Yield what became of each prompt, in the fields of our own replay."""
    manager, requests = make_manager(capacity, block_size), Requests(block_size)
    with lzma.open(path, "rt", encoding="utf-8") as file:
        next(file)  # the head
        for line in file:
            row = json.loads(line)
            request = requests.make(row["token_ids"])
            blocks, num_saved, _ = manager.get_computed_blocks(request)
            given = manager.allocate_slots(request, request.num_tokens - num_saved, num_saved, blocks)
            counts: dict[str, Any] = {"is_refused": True}
            if given is not None:
                held = manager.get_blocks(request.request_id).blocks[0]
                num_reused = num_saved // block_size
                counts = {
                    "num_saved_tokens": num_saved,
                    "num_reused_blocks": num_reused,
                    "num_new_blocks": len(held) - num_reused,
                    "num_cached_blocks": sum(block.block_hash is not None for block in held) - num_reused,
                }
                request.num_computed_tokens = request.num_tokens
                manager.free(request)
            yield {
                "arrival_s": row["arrival_s"],
                "num_prompt_tokens": request.num_tokens,
                "num_held_blocks": len(manager.block_pool.cached_block_hash_to_block),
                **counts,
            }


def make() -> tuple[Callable[..., list[dict[str, Any]]], dict[str, str]]:
    """Return the replay as a list, and the version."""
    return lambda *asked: list(replay(*asked)), {"version": vllm.__version__}


if __name__ == "__main__":
    answer(make)
