"""Execution graphs as text that people read and tests compare, and as drawings in the DOT language.

step 12: 9 rows, 520 tokens, estimated 41.2 ms
  0 copy, blocks 4 > 9, 64.0 KiB
  1 decode, rows 0-7, 8 tokens, reads 0-3, writes 3, estimated 8.1 ms
  2 prefill, rows 8, 512 tokens, reads 9, writes 9-41, estimated 30.1 ms, after 0
  3 sample, rows 0-8, 9 tokens, after 1 2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sagellm.core.number_ranges import ranges
from sagellm.engines.worker.execution_graph import FORWARD_KINDS, ExecutionGraph, GraphNode

_MAX_RUNS = 6
"""Runs of numbers that a drawing lists; beyond that it shows how many numbers there are."""

Shape = tuple[tuple[str, tuple[int, ...]], ...]


class GraphShapes:
    """Draws many steps: of those with the same kinds of nodes and the same edges, only the first.

    Holds one graph per shape, so that a run of any length is a drawing that people can read.
    """

    def __init__(self, *graphs: ExecutionGraph) -> None:
        self._first: dict[Shape, ExecutionGraph] = {}
        self._num_alike: dict[Shape, int] = {}
        for each in graphs:
            self.add(each)

    def add(self, graph: ExecutionGraph) -> None:
        """Include a step."""
        shape = tuple((node.kind, node.after) for node in graph.nodes)
        self._first.setdefault(shape, graph)
        self._num_alike[shape] = self._num_alike.get(shape, -1) + 1

    def to_dot(self) -> str:
        """Return a drawing in the DOT language of Graphviz.

        An edge leads from a node to one that waits for it; what one forward pass computes has a frame.
        """
        lines = ["digraph steps {", "  rankdir=LR;", "  node [shape=box];", "  graph [labeljust=l];"]
        for number, (shape, graph) in enumerate(self._first.items()):
            lines += _drawn(f"step{number}", graph, self._num_alike[shape])
        return "\n".join([*lines, "}", ""])


def graph_to_text(graph: ExecutionGraph) -> str:
    """Print one line per node."""
    lines = [_title(graph)]
    for place, node in enumerate(graph.nodes):
        after = [f"after {' '.join(map(str, node.after))}"] if node.after else []
        lines.append(f"  {place} {', '.join([node.kind, *_facts(node), *after])}")
    return "\n".join(lines)


def _drawn(name: str, graph: ExecutionGraph, num_alike: int) -> Iterator[str]:
    names = [f"{name}_{node.kind}{place}" for place, node in enumerate(graph.nodes)]
    boxes = [_box(*named) for named in zip(names, graph.nodes, strict=True)]
    is_pass = [node.kind in FORWARD_KINDS for node in graph.nodes]
    yield f"  subgraph cluster_{name} {{"
    yield f'    label="{_title(graph)}{f"; {num_alike} more like it" if num_alike else ""}";'
    yield from (f"    {box}" for box, is_inside in zip(boxes, is_pass, strict=True) if not is_inside)
    if any(is_pass):
        yield f"    subgraph cluster_{name}_pass {{"
        yield '      label="forward pass"; style=dashed;'
        yield from (f"      {box}" for box, is_inside in zip(boxes, is_pass, strict=True) if is_inside)
        yield "    }"
    for place, node in enumerate(graph.nodes):
        yield from (f"    {names[other]} -> {names[place]};" for other in node.after)
    yield "  }"


def _box(name: str, node: GraphNode) -> str:
    label = "\\n".join([node.kind, *_facts(node, _MAX_RUNS)])
    return f'{name} [label="{label}"];'


def _title(graph: ExecutionGraph) -> str:
    num_tokens = sum(node.num_tokens for node in graph.nodes if node.kind in FORWARD_KINDS)
    title = f"step {graph.step}: {_count(graph.num_rows, 'row')}, {_count(num_tokens, 'token')}"
    return title if graph.cost_ns is None else f"{title}, estimated {_milliseconds(graph.cost_ns)}"


def _facts(node: GraphNode, max_runs: int | None = None) -> Iterator[str]:
    if node.rows:
        yield f"rows {_listed(ranges(node.rows), len(node.rows), max_runs)}"
        yield _count(node.num_tokens, "token")
    if node.kind == "copy":
        pairs = zip(node.reads or (), node.writes or (), strict=True)
        arrows = [f"{source} > {target}" for source, target in pairs]
        yield f"blocks {_listed(arrows, len(arrows), max_runs)}"
    else:
        for verb, blocks in (("reads", node.reads), ("writes", node.writes)):
            if blocks:
                yield f"{verb} {_listed(ranges(blocks), len(blocks), max_runs)}"
    if node.num_bytes:
        yield f"{node.num_bytes / 1024:.1f} KiB"
    if node.cost_ns is not None:
        yield f"estimated {_milliseconds(node.cost_ns)}"


def _listed(texts: Sequence[str], count: int, max_texts: int | None) -> str:
    if max_texts is not None and len(texts) > max_texts:
        return f"{' '.join(texts[:max_texts])} … ({count})"
    return " ".join(texts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _milliseconds(duration_ns: float) -> str:
    return f"{duration_ns / 1e6:.3g} ms"
