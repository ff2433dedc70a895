"""The latency benchmark's tables say what its records do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

_PATH = sys.path[:]
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))
from latency_tables import write_tables  # noqa: E402

sys.path[:] = _PATH

from smcp_fx.latency.residency import Residency  # noqa: E402

_HELD_OUT = ("held-out median", "95 % of held-out", "telling, median", "95 % of telling",
             "measured anew, median", "95 % of measured anew")  # fmt: skip
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


def written(tmp_path: Path, *lines: dict[str, Any]) -> str:
    write_tables([[machine(), *lines]], tmp_path / "out.md", 0.1)
    return (tmp_path / "out.md").read_text(encoding="utf-8")


def wholes(calibrating: int, factor: float) -> list[dict[str, Any]]:
    """Networks whose rows are right, and prunings that take ``factor`` of what their rows say."""
    found = []
    for index in range(1 - calibrating, 4):
        hot = 1.0 + 0.2 * (index + calibrating)
        whole = {"hot_ms": hot, "cold_ms": hot, "weight_bytes": 1e6, "run_ms": 0.0, "activation_bytes": 0.0,
                 "measured_ms": hot * (factor if index > 0 else 1.0)}  # fmt: skip
        found.append({"kind": "whole", "model": "a", "setting": "64x1", "index": index, "whole": whole,
                      "stable": True, "spread": 0.02, "calibrates": index <= 0, "dense_ms": 1.0,
                      "dense_spread": 0.02})  # fmt: skip
    return found


def row(text: str, start: str) -> dict[str, str]:
    """The cells of the one line that starts so, by the names of its table's columns, of which no two are alike."""
    lines = text.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith(start))
    head = max(i for i in range(at) if lines[i + 1].startswith("| ---"))
    names, found = ([cell.strip() for cell in lines[i][1:-1].split("|")] for i in (head, at))
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


def test_held_out_errors_and_rows_measured_anew(tmp_path: Path) -> None:
    errors, ms = [0.01, 0.02, 0.30, 0.04], [0.02, 0.05, 0.003, 0.1]
    again = {"kind": "again", "model": "a", "setting": "64x1", "errors": [0.01, 0.02, 0.04], "ms": [0.02, 0.05, 0.1],
             "again_ms": [0.025, 0.05, 0.9], "stable": [True, True, False]}  # fmt: skip
    text = written(tmp_path, {**_TABLE, "errors": errors, "held_out_ms": ms}, again)
    found = row(text, "| a | 64x1 | 3 | 40 |")
    expected = [*np.percentile(errors, [50, 95]), *np.percentile([0.01, 0.02, 0.04], [50, 95])]
    expected += [*np.percentile([0.25, 0.0], [50, 95])]  # the unsteady repetition does not count
    assert [found[name] for name in _HELD_OUT] == [f"{share:.1%}" for share in expected]
    assert (found["unstable"], found["failed"]) == ("1", "0")
    assert "Of 2 held-out rows" in text
    assert "100% are within 10 % of what is interpolated there" in text
    assert "50% within 10 % of themselves" in text


def test_points_that_were_unsteady_tell_nothing_of_interpolation(tmp_path: Path) -> None:
    held_out = {"errors": [0.5, 0.02, 0.3], "held_out_ms": [0.02, 0.02, 0.002], "steady": [False, True, True]}
    found = row(written(tmp_path, {**_TABLE, **held_out}), "| a | 64x1 | 3 | 40 |")
    expected = [*np.percentile(held_out["errors"], [50, 95]), 0.02, 0.02]
    assert [found[name] for name in _HELD_OUT[:4]] == [f"{share:.1%}" for share in expected]


def test_both_states_are_told_where_they_were_written_down(tmp_path: Path) -> None:
    both = {
        "errors": [0.01],
        "held_out_ms": [0.02],
        "cold_errors": [0.08, 0.5],
        "cold_held_out_ms": [0.04, 0.005],
    }
    again = {"kind": "again", "model": "a", "setting": "64x1", "errors": [0.01], "ms": [0.02], "again_ms": [0.02],
             "stable": [True], "cold_errors": [0.08], "cold_ms": [0.04], "cold_again_ms": [0.05],
             "cold_stable": [True]}  # fmt: skip
    _, _, text = written(tmp_path, {**_TABLE, **both}, again).partition("weights come from memory")
    expected = [*np.percentile([0.08, 0.5], [50, 95]), 0.08, 0.08, 0.25, 0.25]
    found = row(text, "| a | 64x1 |")
    assert [found[name] for name in _HELD_OUT] == [f"{share:.1%}" for share in expected]
    assert "Of 1 held-out rows" in text
    assert "0% within 10 % of themselves" in text


def test_tables_of_records_without_repetitions(tmp_path: Path) -> None:
    text = written(tmp_path, {**_TABLE, "errors": [0.01], "held_out_ms": [0.002]})
    found = row(text, "| a | 64x1 | 3 | 40 |")
    assert [found[name] for name in _HELD_OUT] == ["1.0%", "1.0%", "", "", "", ""]
    assert "when measured anew" not in text
    assert "come from memory" not in text


def test_networks_measured_a_second_time(tmp_path: Path) -> None:
    """While the machine was a quarter slower one came out a tenth too high, and two changed places."""
    lines = wholes(12, 1.0)
    for line in lines:
        line |= {"again_ms": 1.25 * line["whole"]["measured_ms"], "dense_again_ms": 1.25}
    lines[-1]["again_ms"] *= 1.1
    lines[-2]["again_ms"], lines[-3]["again_ms"] = lines[-3]["again_ms"], lines[-2]["again_ms"]
    first = np.array([line["whole"]["measured_ms"] for line in lines[-3:]])
    second = np.array([first[1], first[0], 1.1 * first[2]])
    text = written(tmp_path, *lines)
    assert "measured a second time" in text
    found = row(text, "| a | 64x1 |")
    assert found["from themselves"] == f"{np.abs(second / first - 1).mean():.1%}"
    assert found["Spearman with themselves"] == "0.500"  # ranks 2, 1, 3 against 1, 2, 3
    assert found["Spearman, all"] == "1.000"
    rows = {"kind": "again", "model": "a", "setting": "64x1", "again_ms": [0.02]}  # not of networks
    once = written(tmp_path, *wholes(12, 1.0), rows)
    assert "measured a second time" not in once
    found = row(once, "| a | 64x1 |")
    assert found["from themselves"] == found["Spearman with themselves"] == ""
    # Of two occasions that of one alone is told where the other timed networks once.
    write_tables([[machine(), *lines], [machine(), *wholes(12, 1.0)]], tmp_path / "out.md", 0.1)
    worst, _, _ = (tmp_path / "out.md").read_text(encoding="utf-8").partition("### 1.")
    found = row(worst, "| a | 64x1 |")
    assert found["from themselves"] == f"{np.abs(second / first - 1).mean():.1%}"
    assert found["Spearman with themselves"] == "0.500"


def test_how_fast_the_cache_forgot_then_counts(tmp_path: Path) -> None:
    """Networks of little weight that are cold since they take long: known by the time that was measured with them."""
    then = Residency.of_cache(1 << 25, 2.0)
    lines = wholes(12, 1.0)
    for line in lines:
        whole = line["whole"]
        whole["cold_ms"] = 1.5 * whole["hot_ms"]
        of = (whole["hot_ms"], whole["cold_ms"], whole["weight_bytes"])
        whole["measured_ms"] = then.latency(*of)
    without = row(written(tmp_path, *lines), "| a | 64x1 |")
    assert float(without["mean error before"].rstrip("%")) > 10
    found = row(written(tmp_path, *({**line, "half_ms": 2.0} for line in lines)), "| a | 64x1 |")
    assert found["mean error before"] == "0.0%"


def test_networks_timed_in_rounds(tmp_path: Path) -> None:
    """What is predicted is the median of the rounds; how far networks are from themselves, the first two rounds."""
    lines = wholes(12, 1.0)
    for line in lines:
        ms = line["whole"]["measured_ms"]
        line |= {"first_ms": 0.9 * ms, "again_ms": 1.08 * ms, "dense_first_ms": 0.9, "dense_again_ms": 0.9}
    found = row(written(tmp_path, *lines), "| a | 64x1 |")
    assert found["from themselves"] == "20.0%"
    assert found["mean error, all"] == "0.0%"


def test_ranks_of_few_steady_networks(tmp_path: Path) -> None:
    """One steady network has no rank, whichever occasion it was on; unsteady ones have one among all."""
    few, many = wholes(12, 1.0), wholes(12, 1.0)
    for line in few[-2:]:
        line["spread"] = 0.5
    for occasions in ([few, many], [many, few]):
        write_tables([[machine(), *lines] for lines in occasions], tmp_path / "out.md", 0.1)
        worst, _, each = (tmp_path / "out.md").read_text(encoding="utf-8").partition("### 1.")
        found = row(worst, "| a | 64x1 |")
        assert (found["occasions"], found["fewest steady"]) == ("2", "1")
        assert found["Spearman"] == "1.000; 1.000"
        found = row(each, "| a | 64x1 | 1 of 3 |")
        assert found["Spearman"] == ""
        assert found["Spearman, all"] == "1.000"


def test_a_model_of_which_none_was_timed_steadily_has_its_row(tmp_path: Path) -> None:
    lines = wholes(12, 1.04)
    for line in lines[-3:]:
        line["spread"] = 0.5
    text = written(tmp_path, *lines)
    found = row(text, "| a | 64x1 |")
    assert found["steady prunings"] == "0 of 3"
    for name in ("bias", "mean error", "within 10 %"):
        assert found[f"{name} before"] == found[f"{name} after"] == ""
    assert found["Spearman"] == ""
    assert found["mean error, all"] == f"{1 - 1 / 1.04:.1%}"
    assert (found["within 10 %, all"], found["Spearman, all"]) == ("100%", "1.000")
    assert "After calibration: none, of those" in text


def test_all_occasions_together(tmp_path: Path) -> None:
    """Rows 4 % too low, 2 and 20 %: the median and the worst; each record says how many networks calibrate."""
    factors, numbers = (1.04, 1.2, 1.02), (5, 6, 12)
    records = [[machine(), *wholes(number, factor)] for number, factor in zip(numbers, factors, strict=True)]
    for record in records:  # all networks take half as long again as their rows say, and one is unsteady
        for line in record[1:]:
            line["whole"] = {**line["whole"], "measured_ms": 1.5 * line["whole"]["measured_ms"]}
        record[-1]["spread"] = 0.2
    write_tables(records, tmp_path / "out.md", 0.1, tmp_path / "each.md")
    together, each = ((tmp_path / name).read_text(encoding="utf-8") for name in ("out.md", "each.md"))
    found = row(together, "| a | 64x1 |")
    assert (found["occasions"], found["fewest steady"]) == ("3", "2")
    assert found["mean error"] == f"{1 - 1 / 1.04:.1%}; **{1 - 1 / 1.2:.1%}**"
    assert found["mean error, uncalibrated"] == f"{1 - 1 / 1.56:.1%}; {1 - 1 / 1.8:.1%}"
    assert (found["within 10 %"], found["Spearman"]) == ("100%; **0%**", "1.000; 1.000")
    assert found["targets within 3 points"] == found["furthest off"] == ""
    assert "Targets" not in together and "Of runtime 1 in way 7 of timing rows" in together
    assert "### 1." not in together and [f"### {i}." in each for i in (1, 2, 3, 4)] == [
        True,
        True,
        True,
        False,
    ]
    for number in numbers:
        assert f"on {number} other networks, the dense one among them" in each
    # What stands around the marks stays, and one file may hold both.
    (tmp_path / "out.md").write_text("before\n" + together + "after\n", encoding="utf-8")
    write_tables(records[:1], tmp_path / "out.md", 0.1)
    text = (tmp_path / "out.md").read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "occasions" not in text and "### 1." in text


def test_targets_are_those_of_the_file_in_a_session_of_its_own(tmp_path: Path) -> None:
    """Of one record's file a second measurement says so; another's was measured in a session of its own at once."""
    tried = [{"measured": 0.56, "stable": True}, {"measured": 0.505, "stable": True}]
    half = {"kind": "target", "model": "a", "setting": "64x1", "asked": 0.5, "tried": tried,
            "measured": 0.51, "stable": False}  # fmt: skip
    lucky = {**half, **tried[1], "again": 0.542, "again_stable": False}
    most = {**half, "asked": 0.7, "tried": [{"measured": 0.69, "stable": False}],
            "measured": 0.68, "stable": True}  # fmt: skip
    text = written(tmp_path, *wholes(12, 1.0), most, lucky)
    found = row(text[text.index("Emitted files") :], "| a | 64x1 |")
    assert found["asked 70%"] == "68.0% (69.0%, 1)"
    assert found["asked 50%"] == "54.2% (unsteady) (56.0%, 2)"
    assert "1 of 2 within 3 points; the first solve's network 1." in text
    text = written(tmp_path, *wholes(12, 1.0), half)
    found = row(text[text.index("Emitted files") :], "| a | 64x1 |")
    assert found["asked 50%"] == "51.0% (unsteady) (56.0%, 2)"
    write_tables([[machine(), *wholes(12, 1.0), x] for x in (lucky, most)], tmp_path / "two.md", 0.1)
    text = (tmp_path / "two.md").read_text(encoding="utf-8")
    assert "Targets: 1 of 2 within 3 points, 1 slower than that." in text
    found = row(text.partition("### 1.")[0], "| a | 64x1 |")
    assert (found["targets within 3 points"], found["furthest off"]) == ("**1 of 2**", "**4.2**")
    write_tables([[machine(), *wholes(12, 1.0), x] for x in (half, most)], tmp_path / "met.md", 0.1)
    found = row((tmp_path / "met.md").read_text(encoding="utf-8").partition("### 1.")[0], "| a | 64x1 |")
    assert (found["targets within 3 points"], found["furthest off"]) == ("2 of 2", "2.0")
    # A pair whose networks were not timed has its row, too.
    write_tables([[machine(), half], [machine("6"), most]], tmp_path / "none.md", 0.1)
    text = (tmp_path / "none.md").read_text(encoding="utf-8")
    found = row(text.partition("### 1.")[0], "| a | 64x1 |")
    assert (found["occasions"], found["mean error"], found["targets within 3 points"]) == ("0", "", "2 of 2")
    assert "Of runtime 1 in way 7, and 1 in way 6 of timing rows" in text
