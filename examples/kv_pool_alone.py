"""The KV pool by itself: two sequences share the blocks of a common prompt."""

from sagellm.core import OutOfBlocksError, SequenceId
from sagellm.kvmgr.kv_pool import BlockAllocationRequest, PagedKVPool


def ask(num_blocks: int, sequence_id: str) -> BlockAllocationRequest:
    return BlockAllocationRequest(num_blocks=num_blocks, sequence_id=SequenceId(sequence_id))


def main() -> None:
    pool = PagedKVPool(total_blocks=12, block_size=16)

    prompt = pool.allocate(ask(4, "alice"))
    pool.share(prompt)  # the second sequence reads the same 64 tokens
    alice, bob = pool.allocate(ask(3, "alice")), pool.allocate(ask(2, "bob"))
    print(f"alice holds {prompt + alice}, bob holds {prompt + bob}")
    print(
        f"{pool.get_free_blocks()} of {pool.total_blocks} blocks are free, two sequences use 13 blocks in 9"
    )

    freed = pool.free(prompt + alice)
    print(f"alice ends: {freed} blocks are free again, {len(prompt)} stay for bob")

    try:
        pool.allocate(ask(10, "carol"))
    except OutOfBlocksError as error:
        print(f"carol waits: {error}")

    pool.set_evictor(lambda num_blocks: pool.free(prompt + bob))  # whoever owns blocks decides which go
    print(f"evicting for carol leaves {pool.evict_if_needed(10)} blocks free")
    block = pool.block_info[pool.allocate(ask(10, "carol"))[0]]
    print(f"block {block.block_id} now belongs to {block.sequence_id} with {block.ref_count} reference")
    pool.check_integrity()


if __name__ == "__main__":
    main()
