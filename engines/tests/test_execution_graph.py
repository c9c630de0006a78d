"""ExecutionGraph: what a step is lowered to, in which order, which graphs are refused; text and drawings."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest

from sagellm.core import InvalidInputError, KVGroup, KVLayout, StepCost, StepInput, StepWork
from sagellm.core.protocols.step import BufferId, CopyBlocks, ReadBlocks, Runs, Scored, WriteBlocks
from sagellm.engines.worker.execution_graph import ExecutionGraph, GraphNode, lower_step
from sagellm.engines.worker.graph_text import GraphShapes, graph_to_text

LAYOUT = KVLayout(
    group=KVGroup(layer_ids=(0, 1), num_kv_heads=2, head_dim=16, dtype="float32"), block_size=16
)
COST = StepCost(base_ns=1e6, token_ns=2e5, kv_token_ns=1e3, pair_ns=10)
BUFFER = BufferId(0)


def ints(*values):
    return np.array(values, np.int32)


def step_of(rows, *, kv_ops=(), drafts=None, scored=()):
    """Rows are (start, number of new tokens, whether sampled)."""
    starts, num_new, is_sampled = zip(*rows, strict=True) if rows else ((), (), ())
    return StepInput(
        step=12,
        seats=np.arange(len(rows), dtype=np.int32),
        num_new=ints(*num_new),
        starts=ints(*starts),
        is_sampled=np.array(is_sampled, np.bool_),
        kv_ops=kv_ops,
        drafts=drafts,
        scored=scored,
    )


def copy(*pairs):
    return CopyBlocks(pairs)


def read(*block_ids):
    return ReadBlocks(block_ids, [BUFFER] * len(block_ids))


def write(*block_ids):
    return WriteBlocks(block_ids, [BUFFER] * len(block_ids))


def lowered(*rows, **others):
    graph = lower_step(step_of(rows, **others))
    graph.verify()
    return graph


def told(graph):
    return [(node.kind, node.rows, node.after) for node in graph.nodes]


def test_decodes_are_one_node_and_prompts_another_and_both_are_sampled():
    graph = lowered((30, 1, True), (8, 1, True), (0, 20, True), (16, 64, False))
    assert told(graph) == [
        ("decode", (0, 1), ()),
        ("prefill", (2, 3), ()),
        ("sample", (0, 1, 2), (0, 1)),
    ]
    assert [node.num_tokens for node in graph.nodes] == [2, 84, 3]


def test_a_step_whose_prompts_do_not_reach_their_end_samples_nothing():
    assert told(lowered((0, 64, False), (64, 1, False))) == [("prefill", (0, 1), ())]


def test_a_row_with_drafts_is_a_decode_of_more_tokens_and_logits():
    drafts = Runs(ints(7, 8, 9), ints(3, 0, 0))
    graph = lowered((30, 4, True), (8, 1, True), (0, 4, True), drafts=drafts)
    assert told(graph) == [
        ("decode", (0, 1), ()),
        ("prefill", (2,), ()),
        ("sample", (0, 1, 2), (0, 1)),
    ]
    assert [node.num_tokens for node in graph.nodes] == [5, 4, 6]


def test_a_prompt_that_is_scored_is_sampled_even_if_it_does_not_reach_its_end():
    graph = lowered((30, 1, True), (0, 8, False), scored=[Scored(1, 0, 8, 0)])
    assert told(graph)[-1] == ("sample", (0, 1), (0, 1))
    assert graph.nodes[-1].num_tokens == 1 + 8


def test_a_step_of_transfers_alone_orders_those_that_share_a_block_and_no_others():
    graph = lowered(kv_ops=[copy((1, 4), (2, 5)), read(4, 9), write(9), read(1), copy((4, 1))])
    assert told(graph) == [
        ("copy", (), ()),
        ("read", (), (0,)),  # what was copied
        ("write", (), (1,)),  # over what was read
        ("read", (), ()),  # both only read block 1
        ("copy", (), (0, 3)),  # reads 4, which was copied; writes 1, which others read before
    ]


def test_without_tables_the_forward_pass_comes_after_all_transfers():
    graph = lowered((30, 1, True), (0, 8, True), kv_ops=[read(3), write(7)])
    assert [node.after for node in graph.nodes] == [(), (), (0, 1), (0, 1), (2, 3)]


def test_with_tables_each_part_comes_after_the_transfers_that_touch_its_blocks():
    step = step_of(
        [(34, 1, True), (10, 40, True)], kv_ops=[copy((20, 4)), write(0), read(2), read(21), copy((1, 22))]
    )
    tables = np.stack((ints(0, 1, 2, 99), ints(4, 5, 6, 7)))
    graph = lower_step(step, layout=LAYOUT, tables=tables)
    graph.verify()
    copied, written, saved, untouched, other = range(5)
    decode, prefill = graph.nodes[5:7]
    assert (decode.kind, decode.reads, decode.writes) == ("decode", (0, 1, 2), (2,))
    assert decode.after == (written, saved)
    assert (prefill.kind, prefill.reads, prefill.writes) == ("prefill", (4,), (4, 5, 6, 7))
    assert prefill.after == (copied,)
    assert not {untouched, other} & {*decode.after, *prefill.after}


def test_the_estimates_of_nodes_and_base_add_up_to_that_of_the_step():
    step = step_of([(34, 1, True), (10, 40, True)])
    graph = lower_step(step, cost=COST)
    assert graph.cost_ns == pytest.approx(COST.predict_ns(StepWork.of(step.starts, step.num_new)))
    assert graph.nodes[1].cost_ns == pytest.approx(40 * 2e5 + 50 * 1e3 + 40 * 30 * 10)
    assert lower_step(step).cost_ns is None
    assert graph.nodes[2].cost_ns is None  # measured as part of the step


def test_the_bytes_of_a_transfer_are_those_of_its_blocks():
    graph = lower_step(step_of([], kv_ops=[copy((1, 2)), read(1, 2, 3)]), layout=LAYOUT)
    assert [node.num_bytes for node in graph.nodes] == [LAYOUT.block_bytes, 3 * LAYOUT.block_bytes]


MIXED = lower_step(step_of([(30, 1, True), (0, 8, True)], kv_ops=[copy((1, 2)), read(2)]))


def with_node(place, **changes):
    nodes = list(MIXED.nodes)
    nodes[place] = replace(nodes[place], **changes)
    return replace(MIXED, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("graph", "why"),
    [
        (with_node(0, after=(2,)), "node 0 .copy. is after 2; only earlier nodes can be"),  # 2 is after 0
        (with_node(3, after=(3,)), "node 3 .prefill. is after 3"),
        (with_node(2, after=(-1,)), "node 2 .decode. is after -1"),
        (with_node(1, after=()), r"node 1 \(read\) must be after node 0 \(copy\)"),
        (with_node(3, after=()), r"node 3 \(prefill\) must be after node 0 \(copy\)"),
        (with_node(4, after=(2,)), r"node 4 \(sample\) must be after node 3 \(prefill\)"),
        (with_node(3, rows=()), r"computes the rows \[0\]; each of 2"),
        (with_node(3, rows=(0, 1)), r"computes the rows \[0, 0, 1\]"),
        (with_node(3, rows=(1, 2)), r"computes the rows \[0, 1, 2\]"),
        (with_node(4, rows=(0, 0, 1)), r"samples the rows \[0, 0, 1\]"),
        (with_node(4, rows=(0, 5)), r"samples the rows \[0, 5\]"),
        (replace(MIXED, nodes=MIXED.nodes[:3]), r"computes the rows \[0\]; each of 2"),
    ],
)
def test_a_graph_that_cannot_be_executed_is_refused(graph, why):
    with pytest.raises(InvalidInputError, match=f"the graph of step 12 cannot be executed.*{why}"):
        graph.verify()


def test_a_dependency_may_be_kept_by_nodes_between():
    chain = [
        GraphNode(kind="copy", reads=(1,), writes=(2,)),
        GraphNode(kind="copy", reads=(2,), writes=(3,), after=(0,)),
        GraphNode(kind="copy", reads=(3,), writes=(2,), after=(1,)),  # writes 2 after both
    ]
    ExecutionGraph(step=1, num_rows=0, nodes=tuple(chain)).verify()


def test_any_order_of_lowered_nodes_that_respects_the_edges_moves_the_same_data():
    chance = random.Random(1)
    for _ in range(200):
        operations = [random_operation(chance) for _ in range(6)]
        graph = lower_step(step_of([], kv_ops=operations))
        graph.verify()
        expected, reordered = [*range(8)], [*range(8)]
        seen, seen_reordered = {}, {}
        for place, operation in enumerate(operations):
            carry_out(operation, expected, seen, place)
        left = set(range(len(operations)))
        while left:
            ready = [place for place in left if not left & {*graph.nodes[place].after}]
            place = chance.choice(ready)
            left.remove(place)
            carry_out(operations[place], reordered, seen_reordered, place)
        assert (reordered, seen_reordered) == (expected, seen)


def random_operation(chance):
    blocks = chance.sample(range(8), 4)
    return chance.choice(
        [copy((blocks[0], blocks[1]), (blocks[2], blocks[3])), read(*blocks[:2]), write(blocks[0])]
    )


def carry_out(operation, memory, seen, place):
    if isinstance(operation, CopyBlocks):
        for source, target in operation.pairs:
            memory[target] = memory[source]
    elif isinstance(operation, ReadBlocks):
        seen[place] = [memory[each] for each in operation.block_ids]
    else:
        for each in operation.block_ids:
            memory[each] = 100 + place


TEXT = """\
step 12: 2 rows, 41 tokens, estimated 9.3 ms
  0 copy, blocks 20 > 4, 8.0 KiB
  1 read, reads 2, 8.0 KiB
  2 write, writes 40-41 50, 24.0 KiB
  3 decode, rows 0, 1 token, reads 0-2, writes 2, estimated 0.235 ms, after 1
  4 prefill, rows 1, 40 tokens, reads 4, writes 4-7, estimated 8.06 ms, after 0
  5 sample, rows 0-1, 2 tokens, after 3 4"""

DOT = r"""digraph steps {
  rankdir=LR;
  node [shape=box];
  graph [labeljust=l];
  subgraph cluster_step0 {
    label="step 12: 2 rows, 41 tokens, estimated 9.3 ms";
    step0_copy0 [label="copy\nblocks 20 > 4\n8.0 KiB"];
    step0_read1 [label="read\nreads 2\n8.0 KiB"];
    step0_write2 [label="write\nwrites 40-41 50\n24.0 KiB"];
    step0_sample5 [label="sample\nrows 0-1\n2 tokens"];
    subgraph cluster_step0_pass {
      label="forward pass"; style=dashed;
      step0_decode3 [label="decode\nrows 0\n1 token\nreads 0-2\nwrites 2\nestimated 0.235 ms"];
      step0_prefill4 [label="prefill\nrows 1\n40 tokens\nreads 4\nwrites 4-7\nestimated 8.06 ms"];
    }
    step0_read1 -> step0_decode3;
    step0_copy0 -> step0_prefill4;
    step0_decode3 -> step0_sample5;
    step0_prefill4 -> step0_sample5;
  }
}
"""


def mixed():
    step = step_of([(34, 1, True), (10, 40, True)], kv_ops=[copy((20, 4)), read(2), write(40, 41, 50)])
    tables = np.stack((ints(0, 1, 2, 99), ints(4, 5, 6, 7)))
    return lower_step(step, layout=LAYOUT, tables=tables, cost=COST)


def test_a_graph_is_printed_one_node_a_line():
    assert graph_to_text(mixed()) == TEXT


def test_a_graph_is_drawn_with_what_one_forward_pass_computes_in_a_frame():
    assert GraphShapes(mixed()).to_dot() == DOT


def test_steps_of_one_shape_are_drawn_once():
    shapes = GraphShapes()
    for number in range(1, 6):
        graph = lowered((30, 1, True)) if number % 2 else lowered((30, 1, True), (0, 9, True))
        shapes.add(replace(graph, step=number))
    labels = re.findall(r'label="(step .*)"', shapes.to_dot())
    assert labels == ["step 1: 1 row, 1 token; 2 more like it", "step 2: 2 rows, 10 tokens; 1 more like it"]


def test_a_long_list_is_cut_in_a_drawing_but_not_in_text():
    blocks = list(range(0, 40, 2))
    graph = lower_step(step_of([], kv_ops=[read(*blocks), copy(*((each, each + 1) for each in blocks))]))
    assert "reads 0 2 4 6 8 10 … (20)" in GraphShapes(graph).to_dot()
    assert "blocks 0 > 1 2 > 3 4 > 5 6 > 7 8 > 9 10 > 11 … (20)" in GraphShapes(graph).to_dot()
    assert "reads 0 2 4 6 8 10 12 14" in graph_to_text(graph)


def test_a_drawing_of_nothing_is_still_a_drawing():
    assert re.fullmatch(r"digraph steps \{\n(  \w+.*;\n)*\}\n", GraphShapes().to_dot())
