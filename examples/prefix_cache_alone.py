"""The prefix cache by itself: two chats share a system prompt, a stranger shares nothing, old leaves go."""

from sagellm.core import Namespace
from sagellm.kvmgr.prefix_cache import RadixPrefixCache

BLOCK_SIZE = 16
system_prompt = list(range(1000, 1064))
chats = {
    "weather": system_prompt + list(range(2000, 2040)),
    "cooking": system_prompt + list(range(3000, 3050)),
}

cache = RadixPrefixCache(max_blocks=16, block_size=BLOCK_SIZE)
next_block = 0
for name, tokens in chats.items():
    match = cache.lock(cache.match_prefix(tokens), num_lookup_tokens=len(tokens))
    num_new = len(tokens) // BLOCK_SIZE - len(match.block_ids)
    table = match.block_ids + list(range(next_block, next_block + num_new))
    next_block += num_new
    result = cache.insert_prefix(tokens, table)
    cache.unlock(match)
    print(f"{name}: {match.match_length} of {len(tokens)} tokens cached, blocks {result.block_ids}")

stranger = cache.match_prefix(chats["weather"], Namespace(tenant="stranger"))
print(f"stranger: {stranger.match_length} tokens cached")

print(f"evicted: blocks {cache.evict(2)}, the end of the chat that was not used for longest")
metrics = cache.metrics()
print(
    f"token hit rate {metrics.token_hit_rate:.0%}, {metrics.num_blocks} blocks in {metrics.num_nodes} nodes"
)
