"""vLLM's KV cache manager without an engine. Runs in vLLM's interpreter, written for 0.32."""

from __future__ import annotations

import os

os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

_HASH = get_hash_fn_by_name("sha256")  # its default
init_none_hash(_HASH)
_PARAMS = SamplingParams(max_tokens=1)


def make_manager(num_blocks: int, block_size: int) -> KVCacheManager:
    """Make a manager of so many usable blocks; one more is its null block."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    config = KVCacheConfig(
        num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(
        config, max_model_len=1 << 20, scheduler_block_size=block_size, hash_block_size=block_size
    )


class Requests:
    """Makes requests of one block size, each with a name of its own."""

    def __init__(self, block_size: int) -> None:
        self.hasher = get_request_block_hasher(block_size, _HASH)
        self._num_made = 0

    def make(self, token_ids: list[int], *, is_hashed: bool = True) -> Request:
        """Make a request, with the hashes of its blocks or without."""
        self._num_made += 1
        hasher = self.hasher if is_hashed else None
        return Request(str(self._num_made), token_ids, _PARAMS, None, block_hasher=hasher)
