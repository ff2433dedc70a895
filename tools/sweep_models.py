"""Prepare, mask, convert and compare every model of `model_lists.py`; writes docs/results/models.md.

    python tools/sweep_models.py [--family timm] [--only NAME ...] [--limit N] [--onnx] [--again failed|all]

Each model runs in a process of its own, under limits of memory and time, so that a crash is a row like any
other. Results are lines of JSON in ``--record``; a model that has a line is not run again, unless ``--again``
says so. Weights and batch-norm statistics are random, masks keep each unit with probability 0.6.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import re
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from model_libraries import PACKAGES  # noqa: E402
from model_lists import entries  # noqa: E402
from try_entry import work  # noqa: E402
from trying import run_apart  # noqa: E402

RECORD = HERE.parent / "docs" / "records" / "models.jsonl"
PAGE = HERE.parent / "docs" / "results" / "models.md"


def main() -> int:
    """Run models without a line, then write the page. Exit code 1 if a model failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=list(dict.fromkeys(entry.family for entry in entries())))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models by name")
    parser.add_argument("--limit", type=int, help="run at most this many")
    parser.add_argument("--onnx", action="store_true", help="export to ONNX and compare, the slow step")
    parser.add_argument(
        "--strength", type=float, help="of batch norms; by default 1, 0.3 in very deep networks"
    )
    parser.add_argument("--again", choices=["failed", "all"], help="run models that have a line already")
    parser.add_argument("--seconds", type=int, default=900, help="time limit of one model")
    parser.add_argument("--gigabytes", type=int, default=14, help="memory limit of one model")
    parser.add_argument("--record", type=Path, default=RECORD, help="the JSON-lines file")
    parser.add_argument("--page", type=Path, default=PAGE, help="the document")
    options = parser.parse_args()
    known = read(options.record)
    chosen = []
    for entry in entries():
        if options.family not in (None, entry.family) or (options.only and entry.name not in options.only):
            continue
        row = known.get(entry.key)
        done = row is not None and not (options.onnx and "onnx_error" not in row and row["status"] == "exact")
        if (
            options.again == "all"
            or not done
            or (options.again == "failed" and row and row["status"] != "exact")
        ):
            chosen.append(entry)
    for entry in chosen[: options.limit]:
        preload(options.onnx)
        made = functools.partial(work, entry, options.gigabytes, options.onnx, options.strength)
        row = run_apart(entry.key, options.seconds, made)
        with options.record.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = {
            key: row.get(key)
            for key in ("status", "why", "free", "error", "trace_s", "prepare_s", "convert_s")
        }
        print(entry.key, json.dumps(shown), flush=True)
    known = read(options.record)
    options.page.write_text(render(known))
    return int(any(row["status"] not in ("exact", "refused") for row in known.values()))


def read(record: Path) -> dict[str, dict[str, Any]]:
    """The last line of each model, in the order of the lists. One without ONNX keeps an earlier line's."""
    rows: dict[str, dict[str, Any]] = {}
    for row in map(json.loads, record.read_text().splitlines() if record.exists() else []):
        exported = {
            name: value for name, value in rows.get(row["key"], {}).items() if name.startswith("onnx_")
        }
        rows[row["key"]] = exported | row
    listed = [entry.key for entry in entries()]
    return {
        key: rows[key] for key in [*listed, *rows] if key in rows
    }  # those of packages that are not here, too


@functools.cache
def preload(onnx: bool) -> None:
    """Import once, before forking, what every model needs; the exporter builds its tables on first use."""
    import torch
    import torchvision  # noqa: F401

    import smcp_fx  # noqa: F401

    with contextlib.suppress(ImportError):
        import timm  # noqa: F401
    if onnx:
        from try_onnx import check_onnx

        torch.set_num_threads(1)
        check_onnx(torch.nn.Conv2d(3, 4, 3).eval(), (torch.randn(2, 3, 8, 8),), {})


# ---- the page -------------------------------------------------------------------------------------------


def introduction() -> list[str]:
    """What is checked, on what, and what the columns say."""
    import torch
    import torchvision

    versions = f"torch {torch.__version__}, torchvision {torchvision.__version__}"
    for package in ("timm", *PACKAGES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions += f", {package} {importlib.metadata.version(package)}"
    return [
        "# Models",
        "",
        "Written by `python tools/sweep_models.py --onnx`, which anyone can run (RegNetY-128GF wants",
        "`--gigabytes 21`). For each model: random weights and batch-norm statistics, `prepare`, a random mask on",
        "every group, forward in `train()` and `eval()`, `convert`, masked against sliced, forward and backward of",
        "the sliced model in `train()`, a save and load round trip, and the ONNX file run by ONNX Runtime.",
        "",
        f"Python {platform.python_version()}, {versions}, one thread. Times are seconds of one run, on a machine",
        "that others used, too.",
        "",
        "*free*: share of the dense layers' input channels (the network's inputs left out) that can be pruned.",
        "*error*: max |masked - sliced| over the output's largest magnitude, float32 (in brackets float64, where",
        "float32 exceeds 1e-5). Networks of 150 batch norms or more had them at 0.3 strength (`--strength 1` for",
        "all of it). *ONNX*: the same between PyTorch and ONNX Runtime, empty where not run; in brackets the batch",
        "norms' strength where a network at full strength amplifies rounding beyond the limit of 1e-4, then",
        "PyTorch's own difference between float32 and float64 where it still does (four times that passes). A sweep",
        "without `--onnx` keeps what one before it found there. *trace*:",
        "tracing and channel graph. *memory*: peak above the model, in GiB.",
        "",
        "Detection models are traced in regions (backbone, heads); what is compared is what the heads give, since",
        "boxes are sorted and suppressed by the last bit of their scores. They are not exported as a whole.",
    ]


def render(rows: dict[str, dict[str, Any]]) -> str:
    """The document: totals, then a table a family, then what is pinned."""
    lines = [
        *introduction(),
        "",
        "| family | models | exact | ONNX checked | median free | refused | not exact |",
        "|---|---|---|---|---|---|---|",
    ]
    families: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for key, row in rows.items():
        family, _, name = key.partition("/")
        families.setdefault(family, []).append((name, row))
    for family, members in families.items():
        exact = sum(row["status"] == "exact" for _, row in members)
        refused = sum(row["status"] == "refused" for _, row in members)
        free = statistics.median([row["free"] for _, row in members if row["status"] == "exact"] or [0.0])
        checked = sum("onnx_error" in row for _, row in members)
        cells = (len(members), exact, checked, f"{free:.3f}", refused, len(members) - exact - refused)
        lines.append(f"| {family} | {' | '.join(map(str, cells))} |")
    for family, members in families.items():
        folded = f'<details markdown="1"><summary>{len(members)} models</summary>'
        lines += ["", f"## {family}", "", folded, ""]
        lines.append("| model | input | free | groups | error | ONNX | trace | prepare | convert | memory |")
        lines.append("|---|---|---|---|---|---|---|---|---|---|")
        lines += [*(_line(name, row) for name, row in members), "", "</details>"]
    lines += [
        "",
        "## Less than 0.9 free",
        "",
        "| model | free | what pins most of the rest |",
        "|---|---|---|",
    ]
    for key, row in rows.items():
        if row["status"] == "exact" and row["free"] < 0.9:
            reason = max(
                row["pinned"], key=row["pinned"].__getitem__, default="no layer whose weight is a parameter"
            )
            lines.append(f"| {key} | {row['free']:.3f} | {reason} |")
    refused = [f"| {key} | {row['not_saved']} |" for key, row in rows.items() if "not_saved" in row]
    if refused:
        lines += ["", "## Not saved", "", "| model | what it says |", "|---|---|", *refused]
    lines += [
        "",
        "## What is pinned",
        "",
        "The first reason of each pinned input channel, over all models.",
        "",
    ]
    lines += ["| reason | channels | models |", "|---|---|---|"]
    counts: Counter[str] = Counter()
    models: Counter[str] = Counter()
    for row in rows.values():
        seen = Counter[str]()
        for reason, count in row.get("pinned", {}).items():
            seen[_general(reason)] += count
        counts.update(seen)
        models.update(seen.keys())
    lines += [f"| {reason} | {count:,} | {models[reason]} |" for reason, count in counts.most_common(40)]
    return "\n".join(lines) + "\n"


def _line(name: str, row: dict[str, Any]) -> str:
    if row["status"] != "exact":
        return (
            f"| {name} | **{row['status']}** | {row.get('why', '')[:200].replace('|', '/')} | | | | | | | |"
        )
    error = f"{row['error']:.1e}" + (f" ({row['error64']:.0e})" if "error64" in row else "")
    exported = f"{row['onnx_error']:.1e}" if "onnx_error" in row else ""
    if "onnx_strength" in row:
        exported += f" (at {row['onnx_strength']:g})"
    if "onnx_rounding" in row:
        exported += f" (own rounding {row['onnx_rounding']:.0e})"
    if "onnx_batch" in row:
        exported += " (fixed batch)"
    size = "x".join(map(str, row["input"]))
    trace = row["trace_s"] + row["graph_s"]
    return (
        f"| {name} | {size} | {row['free']:.3f} | {row['free_groups']} of {row['groups']} | {error} | {exported} "
        f"| {trace:.2f} | {row['prepare_s']:.2f} | {row['convert_s']:.2f} | {row['peak_gib']:.2f} |"
    )


def _general(reason: str) -> str:
    """The reason without the node it names."""
    return re.sub(r"(?<!\w)'[^']*'", "...", reason)


if __name__ == "__main__":
    sys.exit(main())
