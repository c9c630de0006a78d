"""What this package offers to sageLLM."""

from sagellm.core import Provider, hookimpl

SAGELLM_API = 0


@hookimpl
def sagellm_providers() -> list[Provider]:
    here = "acme_blocks.allocators"
    return [
        Provider("kv_allocator", "trusting", f"{here}:Trusting", "frees what is free already"),
        Provider("kv_allocator", "generous", f"{here}:Generous", "gives what there is on a shortage"),
        Provider("kv_allocator", "runs", f"{here}:Runs", "joins free runs, and forgets one of them"),
        Provider("kv_allocator", "common", f"{here}:Common", "one list of free blocks for all instances"),
        Provider("kv_allocator", "lowest", f"{here}:Lowest", "looks for the lowest free block"),
    ]
