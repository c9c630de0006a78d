"""Eviction policies by themselves: the same three chats, and who has to go under each policy."""

from sagellm.kvmgr.eviction import EvictionCandidate, FIFOEvictionPolicy, LRUEvictionPolicy

# In the order of their arrival; times are seconds on any clock.
candidates = [
    EvictionCandidate(sequence_id="first, still active", block_ids=[0, 1, 2], last_access_time=90.0),
    EvictionCandidate(sequence_id="second, long idle", block_ids=[3, 4], last_access_time=20.0),
    EvictionCandidate(sequence_id="third, pinned", block_ids=[5], last_access_time=10.0, is_pinned=True),
    EvictionCandidate(sequence_id="fourth, idle", block_ids=[6, 7], last_access_time=50.0),
]

for policy in (LRUEvictionPolicy(), FIFOEvictionPolicy()):
    victims = policy.select_victims(candidates, required_blocks=3)
    print(f"{type(policy).__name__}: {' | '.join(victims)}")
