"""How the KV of a block lies in memory: geometry, strides, sizes."""

from __future__ import annotations

from dataclasses import dataclass

from sagellm.core.errors import ConfigError

BLOCK_ALIGNMENT_BYTES = 64
_VERSIONS = {"float8_e4m3fn": ":p2"}  # its scales have not always been powers of two
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Layers that keep KV over the same span with the same geometry.

    A block belongs to one group. Models whose layers are all alike have one group; the
    index is part of keys and tables so that models that mix spans fit. `window` is the number of last
    tokens of a sequence whose KV its layers read; None: all of them. Scales are float32, one for each token,
    head, and key or value; those of float8_e4m3fn are powers of two.
    """

    index: int = 0
    layer_ids: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    window: int | None = None
    scale_bytes_per_head: int = 0  # per (layer, key or value, head): scales of quantized KV, after the values

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"kv.dtype is {self.dtype!r}; it must be one of {', '.join(ITEM_BYTES)}")
        if not self.layer_ids or self.num_kv_heads < 1 or self.head_dim < 1:
            raise ConfigError(f"a KV group needs layers, KV heads and a head size of at least 1, got {self}")

    @property
    def num_layers(self) -> int:
        """Layers whose KV one block of this group holds."""
        return len(self.layer_ids)


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Block-major KV: (block, layer, 2, kv_head, token, dim), then the scales, 64-byte aligned.

    All layers of a block are one contiguous run, so a block moves between tiers and
    machines as one piece. Strides count elements of the group's dtype; offsets are in bytes
    and need 64 bits.
    """

    group: KVGroup
    block_size: int = 16

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"kv.block_size is {self.block_size}; it must be at least 1 token")

    @property
    def item_bytes(self) -> int:
        """Bytes of one stored element."""
        return ITEM_BYTES[self.group.dtype]

    @property
    def token_stride(self) -> int:
        """Elements from one token to the next inside a head."""
        return self.group.head_dim

    @property
    def head_stride(self) -> int:
        """Elements from one KV head to the next."""
        return self.block_size * self.token_stride

    @property
    def kv_stride(self) -> int:
        """Elements from the keys of a layer to its values."""
        return self.group.num_kv_heads * self.head_stride

    @property
    def layer_stride(self) -> int:
        """Elements from one layer to the next inside a block."""
        return 2 * self.kv_stride

    @property
    def scales_offset_bytes(self) -> int:
        """Where the scales begin inside a block."""
        return self.group.num_layers * self.layer_stride * self.item_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes from one block to the next, alignment included."""
        scales = self.group.num_layers * 2 * self.group.num_kv_heads * self.group.scale_bytes_per_head
        size = self.scales_offset_bytes + scales
        return -(-size // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES

    @property
    def block_stride(self) -> int:
        """Elements from one block to the next."""
        return self.block_bytes // self.item_bytes

    @property
    def signature(self) -> str:
        """A text that is equal for two layouts if and only if their blocks are interchangeable."""
        group = self.group
        layers = ",".join(map(str, group.layer_ids))
        return (
            f"v1:g{group.index}:l{layers}:h{group.num_kv_heads}:d{group.head_dim}"
            f":b{self.block_size}:{group.dtype}:s{group.scale_bytes_per_head}{_VERSIONS.get(group.dtype, '')}"
        )

    def num_blocks_in(self, num_bytes: int) -> int:
        """Return how many whole blocks fit into `num_bytes`."""
        return num_bytes // self.block_bytes
