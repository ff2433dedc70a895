"""The latency benchmark's tables say what its records do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

_PATH = sys.path[:]
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))
from latency_tables import of_record  # noqa: E402
from latency_targets import of_record as targets_of  # noqa: E402
from records import Record, fill  # noqa: E402

sys.path[:] = _PATH

from smcp_fx.latency.residency import Residency  # noqa: E402

_HELD_OUT = ("held-out median", "95% of held-out", "telling, median", "95% of telling",
             "measured anew, median", "95% of measured anew")  # fmt: skip
_TABLE = {"kind": "table", "model": "a", "setting": "64x1", "blocks": 3, "measured": 40, "reused": 2,
          "seconds": 12.4, "unstable": 1, "failed": 0}  # fmt: skip


def machine(way: str = "7", **settings: str) -> dict[str, Any]:
    fingerprint = {
        "device": "A",
        "runtime": "R",
        "version": "1",
        "threads": 1,
        "settings": {"block_timing": way, **settings},
    }
    return {
        "kind": "machine",
        "time": 0.0,
        "fingerprint": fingerprint,
        "versions": {},
        "cache_bytes": 1 << 25,
    }


def written(*lines: dict[str, Any]) -> str:
    return of_record([machine(), *lines], 0.1)


def wholes(factor: float) -> list[dict[str, Any]]:
    """Prunings that take ``factor`` of what their rows say."""
    found = []
    for index in range(1, 4):
        hot = 1.0 + 0.2 * index
        whole = {"hot_ms": hot, "cold_ms": hot, "weight_bytes": 1e6, "run_ms": 0.0, "activation_bytes": 0.0,
                 "measured_ms": factor * hot}  # fmt: skip
        found.append({"kind": "whole", "model": "a", "setting": "64x1", "index": index, "whole": whole,
                      "spread": 0.02, "dense_ms": 1.0})  # fmt: skip
    return found


def row(text: str, start: str) -> dict[str, str]:
    """The cells of the one line that starts so, by the names of its table's columns, of which no two are alike."""
    lines = text.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith(start))
    head = max(i for i in range(at) if lines[i + 1].startswith("| ---"))
    names, found = ([cell.strip() for cell in lines[i][1:-1].split("|")] for i in (head, at))
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


def test_held_out_errors_and_rows_measured_anew() -> None:
    errors, ms = [0.01, 0.02, 0.30, 0.04], [0.02, 0.05, 0.003, 0.1]
    again = {"kind": "again", "model": "a", "setting": "64x1", "errors": [0.01, 0.02, 0.04], "ms": [0.02, 0.05, 0.1],
             "again_ms": [0.025, 0.05, 0.9], "stable": [True, True, False]}  # fmt: skip
    text = written({**_TABLE, "errors": errors, "held_out_ms": ms}, again)
    found = row(text, "| a | 64x1 | 3 | 40 |")
    expected = [*np.percentile(errors, [50, 95]), *np.percentile([0.01, 0.02, 0.04], [50, 95])]
    expected += [*np.percentile([0.25, 0.0], [50, 95])]  # the unsteady repetition does not count
    assert [found[name] for name in _HELD_OUT] == [f"{share:.1%}" for share in expected]
    assert (found["unstable"], found["failed"]) == ("1", "0")
    assert "Of 2 held-out rows" in text
    assert "100% are within 10% of what is interpolated there" in text
    assert "50% within 10% of themselves" in text


def test_points_that_were_unsteady_tell_nothing_of_interpolation() -> None:
    held_out = {"errors": [0.5, 0.02, 0.3], "held_out_ms": [0.02, 0.02, 0.002], "steady": [False, True, True]}
    found = row(written({**_TABLE, **held_out}), "| a | 64x1 | 3 | 40 |")
    expected = [*np.percentile(held_out["errors"], [50, 95]), 0.02, 0.02]
    assert [found[name] for name in _HELD_OUT[:4]] == [f"{share:.1%}" for share in expected]


def test_both_states_are_told_where_they_were_written_down() -> None:
    both = {
        "errors": [0.01],
        "held_out_ms": [0.02],
        "cold_errors": [0.08, 0.5],
        "cold_held_out_ms": [0.04, 0.005],
    }
    again = {"kind": "again", "model": "a", "setting": "64x1", "errors": [0.01], "ms": [0.02], "again_ms": [0.02],
             "stable": [True], "cold_errors": [0.08], "cold_ms": [0.04], "cold_again_ms": [0.05],
             "cold_stable": [True]}  # fmt: skip
    _, _, text = written({**_TABLE, **both}, again).partition("weights come from memory")
    expected = [*np.percentile([0.08, 0.5], [50, 95]), 0.08, 0.08, 0.25, 0.25]
    found = row(text, "| a | 64x1 |")
    assert [found[name] for name in _HELD_OUT] == [f"{share:.1%}" for share in expected]
    assert "Of 1 held-out rows" in text
    assert "0% within 10% of themselves" in text


def test_tables_of_records_without_repetitions() -> None:
    text = written({**_TABLE, "errors": [0.01], "held_out_ms": [0.002]})
    found = row(text, "| a | 64x1 | 3 | 40 |")
    assert [found[name] for name in _HELD_OUT] == ["1.0%", "1.0%", "", "", "", ""]
    assert "when measured anew" not in text
    assert "come from memory" not in text


def test_sums_against_networks() -> None:
    lines = [
        *wholes(1.25),
        {**wholes(9.0)[0], "index": -3},
    ]  # that one was calibrated on by an earlier version
    lines[1]["spread"] = 0.5
    text = written(*lines)
    found = row(text, "| a | 64x1 |")
    assert (found["prunings"], found["bias"], found["mean error"]) == ("3", "-20.0%", "20.0%")
    assert (found["within 10%"], found["Spearman"], found["spread"]) == ("0%", "1.000", "2.0%")
    assert "All: mean error 20.0%, 0% of 3 within 10%" in text
    assert "at most 10% of their median: mean error 20.0%, 0% of 2 within 10%" in text


def test_networks_measured_a_second_time() -> None:
    """While the machine was a quarter slower one came out a tenth too high, and two changed places."""
    lines = wholes(1.0)
    for line in lines:
        line |= {"again_ms": 1.25 * line["whole"]["measured_ms"], "dense_again_ms": 1.25}
    lines[-1]["again_ms"] *= 1.1
    lines[-2]["again_ms"], lines[-3]["again_ms"] = lines[-3]["again_ms"], lines[-2]["again_ms"]
    first = np.array([line["whole"]["measured_ms"] for line in lines])
    second = np.array([first[1], first[0], 1.1 * first[2]])
    text = written(*lines)
    assert "measured a second time" in text
    found = row(text, "| a | 64x1 |")
    assert found["from themselves"] == f"{np.abs(second / first - 1).mean():.1%}"
    assert found["Spearman with themselves"] == "0.500"  # ranks 2, 1, 3 against 1, 2, 3
    assert found["Spearman"] == "1.000"
    once = written(*wholes(1.0))
    assert "measured a second time" not in once
    found = row(once, "| a | 64x1 |")
    assert found["from themselves"] == found["Spearman with themselves"] == ""


def test_how_fast_the_cache_forgot_then_counts() -> None:
    """Networks of little weight that are cold since they take long: known by the time that was measured with them."""
    then = Residency.of_cache(1 << 25, 2.0)
    lines = wholes(1.0)
    for line in lines:
        whole = line["whole"]
        whole["cold_ms"] = 1.5 * whole["hot_ms"]
        whole["measured_ms"] = then.latency(whole["hot_ms"], whole["cold_ms"], whole["weight_bytes"])
    without = row(written(*lines), "| a | 64x1 |")
    assert float(without["mean error"].rstrip("%")) > 10
    found = row(written(*({**line, "half_ms": 2.0} for line in lines)), "| a | 64x1 |")
    assert found["mean error"] == "0.0%"


def test_targets_are_those_of_the_files_in_the_run_and_in_a_process_of_their_own(tmp_path: Path) -> None:
    record = Record(tmp_path / "r.jsonl")
    tried = [{"name": "first masks near the target", "measured": 0.6}, {"name": "last masks", "measured": 0.51},
             {"name": "last masks, again", "measured": 0.5}]  # fmt: skip
    record.add("target", model="a", setting="64x1", asked=0.5, measured=0.504, again=0.542, again_error=0.004,
               tried=tried)  # fmt: skip
    record.add("target", model="a", setting="64x1", asked=0.7, measured=0.69, again=0.7, again_error=0.001,
               tried=[*tried, {"name": "last masks, try 2", "measured": 0.7}])  # fmt: skip
    text = targets_of(Record(tmp_path / "r.jsonl"))
    found = row(text, "| a | 64x1 |")
    assert found["asked 50%"] == "50.4%, 54.2% ± 0.4 (1)" and found["asked 70%"] == "69.0%, 70.0% ± 0.1 (2)"
    assert found["asked 30%"] == ""
    assert "as the run measured them, 2 of 2 are within 3 points (1.0 at most)" in text
    assert "in a process of their own, 1 of 2 are within 3 points (4.2 at most)" in text


def test_what_stands_around_the_marks_stays(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter\n", encoding="utf-8")
    fill(path, "a", "new")
    assert path.read_text(encoding="utf-8") == (
        "before\n<!-- a: begin -->\n\nnew\n\n<!-- a: end -->\nafter\n"
    )
