"""The channel graph's layout: every group once, no two lines over each other."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from smcp_fx.report import Report
from smcp_fx.report.channel_map import MOST_LEVELS, MapLevel, levels


def groups_of(level: MapLevel) -> list[int]:
    return sorted(
        [index for lane in level.lanes for index in lane.groups]
        + [index for row in level.rows for index in row.inside]
    )


def check_layout(level: MapLevel, count_of_groups: int) -> None:
    """Every group once; no two lanes share a column and a row; each node on a row that writes it."""
    assert groups_of(level) == list(range(count_of_groups))
    taken: set[tuple[int, int]] = set()
    for lane in level.lanes:
        cells = {(lane.column, row) for row in range(min(lane.marks), lane.bottom + 1)}
        assert not cells & taken
        taken |= cells
        assert lane.marks[lane.top] in {"write", "both"}


def test_layout_of_a_network_by_hand() -> None:
    layers = [{"path": path, "kind": "dense"} for path in ("stem", "a.x", "a.y", "b.x", "b.y", "head")]
    layers[4].update(kind="depthwise", in_group="b.x", out_group="b.x")
    groups: list[dict[str, Any]] = [
        {"name": "image", "producers": [], "consumers": ["stem"], "pinned": ["network input 'x'"]},
        {"name": "stem", "producers": ["stem", "a.y"], "consumers": ["a.x", "b.x"], "pinned": []},
        {"name": "a.x", "producers": ["a.x"], "consumers": ["a.y"], "pinned": []},
        {"name": "b.x", "producers": ["b.x"], "consumers": ["head"], "pinned": []},
        {"name": "b.x#2", "producers": ["b.x"], "consumers": ["head"], "pinned": []},
        {"name": "head", "producers": ["head"], "consumers": [], "pinned": ["network output"]},
    ]
    coarse, fine = levels(layers, groups)
    assert [row.label for row in coarse.rows] == ["input", "stem", "a", "b", "head"]
    assert [row.inside for row in coarse.rows] == [(), (), (2,), (), ()]
    assert {lane.groups: dict(lane.marks) for lane in coarse.lanes} == {
        (0,): {0: "write", 1: "read"},
        (1,): {1: "write", 2: "both", 3: "read"},
        (3, 4): {3: "write", 4: "read"},
        (5,): {4: "write"},
    }
    assert [row.label for row in fine.rows] == ["input", "stem", "a.x", "a.y", "b.x", "b.y", "head"]
    assert {lane.groups: dict(lane.marks) for lane in fine.lanes} == {
        (0,): {0: "write", 1: "read"},
        (1,): {1: "write", 2: "read", 3: "write", 4: "read"},
        (2,): {2: "write", 3: "read"},
        (3,): {4: "write", 5: "carry", 6: "read"},
        (4,): {4: "write", 6: "read"},
        (5,): {6: "write"},
    }
    for level in (coarse, fine):
        check_layout(level, len(groups))


def test_layout_of_a_real_network_is_its_channel_graph(real: Report) -> None:
    groups = [asdict(group) for group in real.groups]
    found = levels([asdict(layer) for layer in real.layers], groups)
    for level in found:
        check_layout(level, len(groups))
    finest = found[-1]
    for lane in finest.lanes:
        (index,) = lane.groups
        group = groups[index]
        for mark, key in (("write", "producers"), ("read", "consumers")):
            drawn = {
                finest.rows[row].label
                for row, found_mark in lane.marks.items()
                if found_mark in {mark, "both"}
            }
            assert drawn - {"input"} == set(group[key])
    depthwise = next(row for row, shown in enumerate(finest.rows) if shown.label == "side.1")
    assert [lane.marks[depthwise] for lane in finest.lanes if depthwise in lane.marks] == ["carry"]


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    names = st.lists(st.sampled_from("abc"), min_size=1, max_size=9).map(".".join)
    paths = draw(st.lists(names, min_size=1, max_size=14, unique=True))
    some = st.lists(st.sampled_from(paths), max_size=4, unique=True)
    members = draw(st.lists(st.tuples(some, some, st.booleans()), min_size=1, max_size=12))
    groups = [
        {"name": str(i), "producers": writes, "consumers": reads, "pinned": ["why"] * pinned}
        for i, (writes, reads, pinned) in enumerate(members)
        if writes or reads
    ]
    return [{"path": path, "kind": "dense"} for path in paths], groups


@given(networks())
def test_any_layout_is_sound(network: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    layers, groups = network
    found = levels(layers, groups)
    assert (len(found) == 0) == (len(groups) == 0)
    assert len(found) <= MOST_LEVELS
    sizes = [len(level.rows) for level in found]
    assert sizes == sorted(set(sizes))
    for level in found:
        check_layout(level, len(groups))
    if found:
        shown = {row.label for row in found[-1].rows} - {"input"}
        assert shown == {layer["path"] for layer in layers}
