"""Two NUMA nodes with two GPUs each: GPUs 0 and 1 on node 0, joined by NVLink, GPUs 2 and 3 on node 1."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from sagellm.core import BlockError, InvalidInputError, OutOfMemoryError, Topology, UnknownNameError
from sagellm.core.protocols.topology import GPU, Link, NullTopology, NumaNode
from sagellm.kvmgr.kv_pool import BlockLocation, MigrationPlan, Placement, plan_migration

LINKS = {(0, 1): "nvlink", (2, 3): "nvlink"}  # the others cross the sockets
GPUS = [f"gpu:{index}" for index in range(4)]
PLACES = ["numa:0", "numa:1", *GPUS]


def machine(**changed) -> Topology:
    nodes = tuple(
        NumaNode(node_id=node, cpu_ids=(node,), memory_bytes=1 << 40, distances=distances)
        for node, distances in enumerate([(10, 21), (21, 10)])
    )
    gpus = tuple(
        GPU(
            index=index,
            name="Big GPU",
            memory_bytes=80 << 30,
            compute_capability=(9, 0),
            numa_node=index // 2,
            pci_bus_id=f"0000:0{index}:00.0",
        )
        for index in range(4)
    )
    links = tuple(
        Link(first_gpu=a, second_gpu=b, kind=LINKS.get((a, b), "system"))
        for a in range(4)
        for b in range(a + 1, 4)
    )
    return replace(NullTopology().read(), **{"numa_nodes": nodes, "gpus": gpus, "links": links} | changed)


def blocks_at(place: str, consumer: str, num_blocks: int, *, num_bytes: int = 10) -> list[BlockLocation]:
    return [
        BlockLocation(block_id=number, num_bytes=num_bytes, place=place, consumer=consumer)
        for number in range(num_blocks)
    ]


def landings(plan: MigrationPlan) -> dict[tuple[str, str], int]:
    return Counter((move.source, move.target) for move in plan.moves)


@pytest.mark.parametrize(
    ("consumer", "order"),
    [
        ("gpu:0", ["gpu:0", "gpu:1", "numa:0", "gpu:2", "gpu:3", "numa:1"]),
        ("gpu:3", ["gpu:3", "gpu:2", "numa:1", "gpu:0", "gpu:1", "numa:0"]),
        ("numa:1", ["numa:1", "gpu:2", "gpu:3", "numa:0", "gpu:0", "gpu:1"]),
    ],
)
def test_a_block_goes_to_its_consumer_and_then_where_the_topology_is_nearest(consumer, order):
    placement = Placement(machine())
    assert list(placement.nearest(consumer)) == order
    free_bytes = dict.fromkeys(PLACES, 10)
    for place in order:  # each one takes one block and is full
        assert placement.place(consumer, 10, free_bytes) == place
        free_bytes[place] -= 10
    with pytest.raises(OutOfMemoryError, match=f"10 bytes for {consumer} fit nowhere that it can reach"):
        placement.place(consumer, 10, free_bytes)


def test_links_are_those_of_the_topology():
    placement = Placement(machine())
    kinds = {
        ("gpu:0", "gpu:1"): "nvlink",
        ("gpu:1", "gpu:2"): "system",
        ("gpu:0", "numa:0"): "pcie",
        ("numa:0", "gpu:2"): "system",
        ("numa:1", "numa:0"): "numa",
    }
    assert {pair: placement.link(*pair).kind for pair in kinds} == kinds
    assert not any(placement.link(*pair).is_measured for pair in kinds)


def test_a_measured_rate_decides_over_the_kind_of_link():
    measured = {("numa:1", "gpu:0"): 50e9, ("gpu:0", "numa:1"): 5e9, ("gpu:1", "gpu:0"): 1e9}
    placement = Placement(machine(), bytes_per_s=measured)
    assert placement.nearest("gpu:0")[:2] == ("gpu:0", "numa:1")
    assert placement.nearest("gpu:0")[-1] == "gpu:1"
    assert placement.link("gpu:0", "numa:1").bytes_per_s == 5e9
    assert placement.link("gpu:0", "gpu:1").bytes_per_s == 1e9  # as the other way
    assert placement.link("gpu:0", "gpu:1").is_measured


def test_farther_nodes_come_later_and_a_gpu_of_no_known_node_is_far_from_all():
    distances = [(10, 40, 20), (40, 10, 20), (20, 20, 10)]
    nodes = tuple(
        NumaNode(node_id=2 * number, cpu_ids=(), memory_bytes=0, distances=distances[number])
        for number in range(3)
    )
    gpu = replace(machine().gpus[0], numa_node=None)
    placement = Placement(machine(numa_nodes=nodes, gpus=(gpu,), links=()))
    assert placement.nearest("numa:0") == ("numa:0", "numa:4", "gpu:0", "numa:2")
    assert {placement.link("gpu:0", f"numa:{node}").kind for node in (0, 2, 4)} == {"system"}
    alone = Placement(machine(numa_nodes=NullTopology().read().numa_nodes, gpus=(gpu,), links=()))
    assert alone.link("gpu:0", "numa:0").kind == "pcie"


def test_blocks_move_to_their_consumers_over_the_links_between():
    placement = Placement(machine(), bytes_per_s={("numa:0", "gpu:0"): 100.0, ("numa:1", "gpu:2"): 50.0})
    blocks = [
        *blocks_at("numa:0", "gpu:0", 5),
        *blocks_at("numa:1", "gpu:2", 5),
        *blocks_at("gpu:3", "gpu:3", 5),
    ]
    plan = plan_migration(placement, blocks, {"gpu:0": 50, "gpu:2": 50})
    assert landings(plan) == {("numa:1", "gpu:2"): 5, ("numa:0", "gpu:0"): 5}
    assert [(group.link.source, group.num_bytes, group.duration_s) for group in plan.links] == [
        ("numa:1", 50, 1.0),
        ("numa:0", 50, 0.5),
    ]
    assert plan.duration_s == 1.0  # side by side
    assert plan_migration(placement, blocks_at("gpu:3", "gpu:3", 5), {}).duration_s == 0


def test_a_full_target_sends_the_rest_next_door_and_what_gets_no_nearer_stays():
    placement = Placement(machine())
    free_bytes = {"gpu:0": 25, "gpu:1": 10, "numa:1": 1000}
    plan = plan_migration(placement, blocks_at("numa:0", "gpu:0", 5), free_bytes)
    assert landings(plan) == {("numa:0", "gpu:0"): 2, ("numa:0", "gpu:1"): 1}
    assert [move.block_id for move in plan.moves if move.target == "gpu:0"] == [0, 1]  # the first ones given


def test_a_drained_gpu_is_left_by_every_block_for_the_nearest_room():
    placement = Placement(machine())
    blocks = [*blocks_at("gpu:1", "gpu:1", 6), *blocks_at("gpu:0", "gpu:1", 2)]
    free_bytes = {"gpu:1": 1000, "gpu:0": 20, "numa:0": 30, "gpu:2": 30}
    plan = plan_migration(placement, blocks, free_bytes, drain={"gpu:1"})
    assert landings(plan) == {("gpu:1", "gpu:0"): 2, ("gpu:1", "numa:0"): 3, ("gpu:1", "gpu:2"): 1}
    with pytest.raises(
        OutOfMemoryError, match=r"gpu:1 cannot be drained: block 2 of 10 bytes.*gpu:0 0, numa:0 5$"
    ):
        plan_migration(placement, blocks, {"gpu:0": 20, "numa:0": 5}, drain={"gpu:1"})


def test_what_must_leave_goes_before_what_would_like_to_move():
    placement = Placement(machine())
    blocks = [*blocks_at("numa:1", "gpu:0", 2), *blocks_at("gpu:1", "gpu:0", 2)]
    plan = plan_migration(placement, blocks, {"gpu:0": 20}, drain={"gpu:1"})
    assert landings(plan) == {("gpu:1", "gpu:0"): 2}


def test_a_block_goes_only_where_a_link_leads_from_its_place():
    placement = Placement(machine(links=()))
    blocks = blocks_at("gpu:0", "numa:0", 1)
    assert placement.nearest("numa:0")[:3] == ("numa:0", "gpu:0", "gpu:1")
    plan = plan_migration(placement, blocks, {"gpu:1": 10, "numa:1": 10}, drain={"gpu:0"})
    assert landings(plan) == {("gpu:0", "numa:1"): 1}


def test_two_numa_nodes_are_balanced_by_naming_new_consumers():
    placement = Placement(machine())
    blocks = [replace(block, consumer=f"numa:{block.block_id % 2}") for block in blocks_at("numa:0", "", 8)]
    plan = plan_migration(placement, blocks, {"numa:1": 40})
    assert landings(plan) == {("numa:0", "numa:1"): 4}
    assert [move.block_id for move in plan.moves] == [1, 3, 5, 7]


def test_what_cannot_be_planned_is_refused_with_the_reason():
    placement = Placement(machine())
    known = "this machine has numa:0, numa:1, gpu:0, gpu:1, gpu:2, gpu:3"
    for blocks, free_bytes in (
        (blocks_at("gpu:9", "gpu:0", 1), {}),
        (blocks_at("gpu:0", "gpu:9", 1), {}),
        ([], {"gpu:9": 1}),
    ):
        with pytest.raises(UnknownNameError, match=f"there is no place 'gpu:9'; {known}"):
            plan_migration(placement, blocks, free_bytes)
    with pytest.raises(UnknownNameError, match="Did you mean 'numa:0'"):
        placement.nearest("numa0")
    with pytest.raises(BlockError, match="block 0 of gpu:0 is given twice"):
        plan_migration(placement, 2 * blocks_at("gpu:0", "gpu:1", 1), {})
    for size in (0, -1, 1.5, True):
        with pytest.raises(BlockError, match="give an int of at least 1"):
            plan_migration(placement, blocks_at("gpu:0", "gpu:1", 1, num_bytes=size), {})
    with pytest.raises(InvalidInputError, match="no link leads from gpu:0 to gpu:1"):
        plan_migration(Placement(machine(links=())), blocks_at("gpu:0", "gpu:1", 1), {"gpu:1": 10})
    for rate in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidInputError, match="give a number above 0"):
            Placement(machine(), bytes_per_s={("gpu:0", "gpu:1"): rate})


@st.composite
def loads(draw) -> tuple[list[BlockLocation], dict[str, int], set[str]]:
    places = st.sampled_from(PLACES)
    sizes = st.integers(1, 20)
    given_blocks = draw(st.lists(st.tuples(places, places, sizes), max_size=40))
    blocks = [
        BlockLocation(block_id=number, num_bytes=num_bytes, place=place, consumer=consumer)
        for number, (place, consumer, num_bytes) in enumerate(given_blocks)
    ]
    return blocks, draw(st.dictionaries(places, st.integers(0, 200))), draw(st.sets(places, max_size=2))


@pytest.mark.no_cover
@settings(max_examples=300, deadline=None)
@given(loads())
def test_no_plan_goes_over_what_is_free_and_each_block_lands_as_near_as_there_is_room(load):
    blocks, free_bytes, drain = load
    placement = Placement(machine())
    try:
        plan = plan_migration(placement, blocks, free_bytes, drain=drain)
    except OutOfMemoryError:
        num_open = sum(free for place, free in free_bytes.items() if place not in drain)
        largest = 20 * (len(free_bytes) + 1)  # left over in each place, and the block that did not fit
        assert drain
        assert sum(block.num_bytes for block in blocks if block.place in drain) > num_open - largest
        return
    room = dict(free_bytes)
    for move in plan.moves:
        room[move.target] -= move.num_bytes
    assert all(free >= 0 for free in room.values())
    moves = {move.block_id: move for move in plan.moves}
    assert len(moves) == len(plan.moves)
    for block in blocks:
        move = moves.pop(block.block_id, None)
        at = move.target if move else block.place
        assert at not in drain
        if move:
            assert (move.source, move.num_bytes) == (block.place, block.num_bytes)
        if block.place in drain or block.consumer not in drain:
            order = placement.nearest(block.consumer)
            nearer = set(order[: order.index(at)]) - drain
            assert all(room.get(place, 0) < block.num_bytes for place in nearer)
        else:
            assert move is None
    assert not moves
    assert all(
        (move.source, move.target) == (group.link.source, group.link.target)
        for group in plan.links
        for move in group.moves
    )
    assert len({group.link for group in plan.links}) == len(plan.links)
