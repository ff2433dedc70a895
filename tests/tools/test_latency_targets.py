"""The latency benchmark seeks a target as the compiler does, and the nearest file counts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from smcp_fx.compiler.measuring import TRIES

_PATH = sys.path[:]
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))
from latency_targets import Counts, seek  # noqa: E402

sys.path[:] = _PATH


def sought(
    asked: float, networks: Callable[[float], float], files: Sequence[float]
) -> tuple[dict[str, Any], Counts, list[float]]:
    """Return what is found, the counts of that, and every fraction that was solved for.

    ``networks``: what a network measures, by what is predicted of it; ``files``: what one file after another does.
    Counts are thousandths of what is predicted.
    """
    aims: list[float] = []
    of_files: Iterator[float] = iter(files)

    def solve(fraction: float) -> Counts:
        aims.append(fraction)
        return {"a": round(1000 * fraction)}

    def predict(counts: Counts) -> float:
        return counts["a"] / 1000

    found, counts = seek(
        asked,
        solve,
        predict,
        lambda counts: {"measured": networks(predict(counts)), "error": 0.001},
        lambda _: {"measured": next(of_files), "error": 0.001, "rounds": 5},
    )
    assert next(of_files, None) is None, "not every file was measured"
    return found, counts, aims


def test_a_first_solve_that_fits_ends_it() -> None:
    found, counts, aims = sought(0.5, lambda predicted: predicted, [0.504])
    assert aims == [0.5] and counts == {"a": 500}
    assert found["measured"] == 0.504 and found["predicted"] == 0.5 and found["rounds"] == 5
    assert (found["kept"], found["files"], len(found["tried"])) == (0, 1, 1)
    assert found["tried"][0] == {"measured": 0.5, "predicted": 0.5, "error": 0.001}


def test_a_network_that_misses_has_no_file_measured_and_teaches_the_next_aim() -> None:
    found, counts, aims = sought(0.5, lambda predicted: 1.25 * predicted, [0.495])
    assert aims == pytest.approx([0.5, 0.4]) and counts == {"a": 400}
    assert [tried["measured"] for tried in found["tried"]] == pytest.approx([0.625, 0.5])
    assert (found["kept"], found["files"], found["measured"]) == (1, 1, 0.495)


def test_a_file_that_misses_is_known_beside_its_network() -> None:
    """Of the factors that two measurements of one choice tell, 1 and 1.08, the middle (of logarithms) counts."""
    found, counts, aims = sought(0.5, lambda _: 0.5, [0.54, 0.5])
    assert aims == pytest.approx([0.5, 0.5 / 1.08**0.5])
    assert counts == {"a": 481}
    assert (found["kept"], found["files"], found["measured"]) == (1, 2, 0.5)


def test_where_nothing_fits_the_nearest_file_counts() -> None:
    """Networks beside a gap: the nearest one's file is measured at the end, and it alone."""
    found, counts, aims = sought(0.5, lambda predicted: 0.53 if predicted >= 0.45 else 0.4, [0.52])
    assert len(aims) == len(found["tried"]) == TRIES + 1
    assert found["files"] == 1 and found["measured"] == 0.52
    assert found["tried"][found["kept"]]["measured"] == 0.53
    assert counts["a"] / 1000 == found["predicted"]


def test_files_that_all_miss_leave_the_nearest_of_them() -> None:
    """Every network fits and no file does: each was measured, and none again."""
    files = [0.55, 0.46, 0.53, 0.56, 0.45, 0.57]
    found, _, aims = sought(0.5, lambda _: 0.5, files)
    assert len(aims) == found["files"] == TRIES + 1
    assert (found["kept"], found["measured"]) == (2, 0.53)
