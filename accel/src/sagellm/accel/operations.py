"""The operations of a decoder's step, and the weights that each reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from sagellm.core.protocols.forward import Operation, OperationWeights
from sagellm.core.protocols.model_spec import DecoderLinears, FusedLinear


def linears_by_operation(linears: DecoderLinears) -> Iterator[tuple[Operation, FusedLinear]]:
    """Yield every linear of a decoder after the operation that multiplies by it; experts are as one."""
    yield "head", linears.head
    for layer in linears.layers:
        yield from (("qkv", each) for each in layer.qkv)
        yield "output", layer.output
        for gate_up, down in layer.feed_forward:
            yield from (("gate_up", each) for each in gate_up)
            yield "down", down


def add_up(sizes: Iterable[tuple[Operation, int, str]]) -> dict[Operation, OperationWeights]:
    """Return the weights of each operation, from its linears' bytes and number formats.

    Of several formats the one of most bytes is named.
    """
    by_format: dict[Operation, Counter[str]] = {}
    for operation, num_bytes, dtype in sizes:
        by_format.setdefault(operation, Counter())[dtype] += num_bytes
    return {
        operation: OperationWeights(num_bytes=found.total(), dtype=found.most_common(1)[0][0])
        for operation, found in by_format.items()
    }
