"""The TensorRT benchmark's verdicts and its table of runtimes, on figures whose verdicts are known."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "tools" / "bench" / "tensorrt_verdicts.py"
SPEC = importlib.util.spec_from_file_location("tensorrt_verdicts", FILE)
assert SPEC is not None and SPEC.loader is not None
bench = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench)


def results(**changed: Any) -> dict[str, Any]:
    """All parts, as the benchmark writes them, every figure within its limit."""
    found = {
        "engines": {"fp16": {"relative_error": 0.009, "graph": {"median_ms": 2.0}, "enqueue": {"median_ms": 2.5}},
                    "fp32": {"relative_error": 9e-5}, "seconds": 1.0},
        "table": {"complete": True, "rows_before": 0, "measuring_seconds": 599.0},
        "prunings": {"mean_absolute_error": 0.05, "spearman": 0.98},
        "targets": {"targets": {"0.3": bench.summary(0.3, [{"measured": 0.32}, {"measured": 0.31}])}},
        "solvers": {"knapsack_same_value": True},
        "others": {"torch_eager": {"median_ms": 9.0}, "torch_compile": {"error": "no"}, "seconds": 3.0},
    }  # fmt: skip
    return found | changed


def test_figures_within_their_limits_hold() -> None:
    found = bench.verdicts(results())
    assert all(verdict["holds"] for verdict in found.values())
    assert set(found) == {
        "outputs_fp16", "outputs_fp32", "table_seconds", "table_mean_absolute_error", "table_spearman",
        "target_0.3_first_miss", "target_0.3_best_miss", "knapsack_same_value",
    }  # fmt: skip
    assert found["target_0.3_best_miss"]["found"] == pytest.approx(0.01)
    assert bench.runtimes(results()) == {"tensorrt_graph": 2.0, "tensorrt_enqueue": 2.5, "torch_eager": 9.0}


@pytest.mark.parametrize(
    ("changed", "fails"),
    [
        ({"engines": {"fp32": {"relative_error": 2e-4}}}, {"outputs_fp32"}),
        ({"table": {"complete": True, "rows_before": 0, "measuring_seconds": 601.0}}, {"table_seconds"}),
        ({"prunings": {"mean_absolute_error": 0.06, "spearman": 1.0}}, {"table_mean_absolute_error"}),
        ({"prunings": {"mean_absolute_error": 0.01, "spearman": 0.97}}, {"table_spearman"}),
        ({"solvers": {"allocator_same_counts": False}}, {"allocator_same_counts"}),
        (
            {"targets": {"targets": {"0.3": bench.summary(0.3, [{"measured": 0.34}, {"error": "no"}])}}},
            {"target_0.3_first_miss", "target_0.3_best_miss"},
        ),
    ],
)  # fmt: skip
def test_figures_beyond_their_limits_do_not(changed: dict[str, Any], fails: set[str]) -> None:
    found = bench.verdicts(results(**changed))
    assert {name for name, verdict in found.items() if not verdict["holds"]} == fails


def test_what_was_not_measured_has_no_verdict() -> None:
    assert bench.verdicts({}) == {} and bench.runtimes({}) == {}
    resumed = bench.verdicts(results(table={"complete": True, "rows_before": 7, "measuring_seconds": 1.0}))
    assert "table_seconds" not in resumed
    unreached = {"targets": {"0.3": bench.summary(0.3, [{"error": "no"}])}, "error": "no"}
    assert not any(name.startswith("target") for name in bench.verdicts(results(targets=unreached)))


def test_agreement_is_of_ratios_and_ranks() -> None:
    rows = [{"predicted_ms": p, "measured_ms": m} for p, m in ((1.1, 1.0), (1.9, 2.0), (4.0, 4.0))]
    found = bench.agreement(rows)
    assert found["mean_absolute_error"] == pytest.approx((0.1 + 0.05) / 3)
    assert found["largest_error"] == pytest.approx(0.1) and found["spearman"] == pytest.approx(1.0)
    assert "spearman" not in bench.agreement(rows[:2])
