"""The pages about GPUs, made of the record alone: figures, and what the README and the guide may say has run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from records import Record, table

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "docs" / "records" / "gpu.jsonl"
Line = Mapping[str, Any]

#: What TensorRT does, in order; see `has_run`.
CLAIMS = ("engines", "tables", "targets", "INT8")
_INTRODUCTION = """# On a GPU

`tools/bench/gpu_hour` made these figures, stage by stage; `python -m gpu_hour report` writes this page from
`docs/records/gpu.jsonl`. Weights are random, which does not matter to latency."""
_PARTS = {
    "PyTorch on CUDA graphs": ("pytorch-resnet50", "pytorch-mobilenet_v2"),
    "TensorRT's rows": ("tensorrt-rows",),
    "TensorRT's tables and targets": ("tensorrt-resnet18", "tensorrt-resnet50"),
    "the knapsack and the allocation": ("solvers",),
    "training steps": ("training", "training-compiled"),
    "`compress`": ("compress",),
    "INT8 engines": ("int8",),
    "whole TensorRT engines": ("engines",),
}


def figures(lines: Sequence[Line], stages: Sequence[str], prefix: str = "") -> list[Line]:
    """Return the last line of each figure of these stages whose name begins so; failed figures are left out."""
    found = {
        (line["stage"], line["device"], line["figure"]): line
        for line in lines
        if line["kind"] == "figure" and line["stage"] in stages and line["figure"].startswith(prefix)
    }
    return [line for line in found.values() if "error" not in line["values"]]


def has_run(lines: Sequence[Line]) -> dict[str, Line]:
    """Return which of `CLAIMS` the record bears out, each with a line that does."""
    networks = ("tensorrt-resnet18", "tensorrt-resnet50")
    found = {
        "engines": figures(lines, ("engines", "int8")) + figures(lines, networks, "dense"),
        "tables": [line for line in figures(lines, networks, "check") if line["values"]["networks"] > 1],
        "targets": [line for line in figures(lines, networks, "target ") if line["values"]["met"]],
        "INT8": figures(lines, ("int8",), "outputs"),
    }
    return {claim: found[claim][-1] for claim in CLAIMS if found[claim]}


# ---- the texts ------------------------------------------------------------------------------------------------


def readme(lines: Sequence[Line]) -> str:
    """Return the README's cell about TensorRT."""
    ran = has_run(lines)
    there = [claim for claim in CLAIMS if claim in ran]
    where = dict.fromkeys(f"{ran[c]['device']} with {ran[c]['versions']['tensorrt']}" for c in there)
    told = [f"checked on an {' and an '.join(where)}: {', '.join(there)}"] if there else []
    missing = [claim for claim in CLAIMS if claim not in ran]
    told += [f"on a stand-in only: {', '.join(missing)}"] if missing else []
    return "; ".join(told) + " ([figures](docs/results/gpu.md), [how](docs/guides/tensorrt.md))"


def guide(lines: Sequence[Line]) -> str:
    """Return the guide's remark: a warning while something has not run on a GPU."""
    missing = [claim for claim in CLAIMS if claim not in has_run(lines)]
    kind = "warning" if missing else "note"
    return f'!!! {kind} "{sentence(lines)}"\n    [The figures](../results/gpu.md), with devices and versions.'


def sentence(lines: Sequence[Line]) -> str:
    """Return what has run on a GPU, and what has not, for the list of results."""
    ran = has_run(lines)
    there, missing = ([c for c in CLAIMS if (c in ran) is yes] for yes in (True, False))
    told = [f"TensorRT's {', '.join(there)} have run on a GPU"] if there else []
    told += [f"{'' if there else 'TensorRT: '}{', '.join(missing)} on a stand-in only"] if missing else []
    return "; ".join(told) + "."


def page(lines: Sequence[Line]) -> str:
    """Return the page of results."""
    sections = [text for part in (_targets, _tables, _engines, _rows, _solvers, _training, _compress) if
                (text := part(lines))]  # fmt: skip
    missing = [
        name
        for name, stages in _PARTS.items()
        if not any(line["figure"] != "smoke" for line in figures(lines, stages))
    ]
    last = [f"Not measured yet: {', '.join(missing)}."] if missing else []
    return "\n\n".join([_INTRODUCTION, *sections, *last]) + "\n"


def _targets(lines: Sequence[Line]) -> str:
    stages = [stage.name for stage in _all() if stage.name.startswith(("pytorch", "tensorrt", "int8"))]
    rows = []
    for line in figures(lines, stages, "target "):
        values, dense = line["values"], _of(lines, line, "dense")
        rows.append([
            *_where(line), f"{dense['network']}, batch {dense['batch']}, {dense['fingerprint']['precision']}",
            f"{dense['median_ms']:.3f} ms", f"{values['asked']:.0%}", f"{values['first_measured']:.1%}",
            f"{values['measured']:.1%}", str(values["tries"]), str(values["rows"]), f"{values['seconds']:.0f} s",
        ])  # fmt: skip
    head = ("device", "runtime", "network", "dense", "asked", "first", "reached", "measurements", "rows",
            "time")  # fmt: skip
    text = "*First*: the first choice as measured, *reached*: after corrections."
    return _section("Targets", head, rows, text)


def _tables(lines: Sequence[Line]) -> str:
    rows = []
    for line in figures(lines, [stage.name for stage in _all()], "check"):
        values, dense = line["values"], _of(lines, line, "dense")
        rows.append([
            *_where(line), f"{dense['network']}, batch {dense['batch']}, {dense['fingerprint']['precision']}",
            str(values["rows"]), str(values["failed"]), f"{values['held_out_median']:.1%}",
            f"{values['held_out_p95']:.1%}", str(values["networks"]), f"{values['mean_error']:.1%}",
            f"{values['largest_error']:.1%}", "" if values["spearman"] is None else f"{values['spearman']:.3f}",
        ])  # fmt: skip
    head = ("device", "runtime", "network", "rows", "failed", "held-out median", "95% of held-out", "networks",
            "mean error", "largest", "Spearman")  # fmt: skip
    return _section("Tables against whole networks", head, rows)


def _engines(lines: Sequence[Line]) -> str:
    found = figures(lines, ("engines",)) + figures(lines, ("int8",), "outputs")
    rows = [
        [
            *_where(line), "INT8" if line["stage"] == "int8" else line["figure"].partition(",")[0], str(v["batch"]),
            f"{v['graph']['median_ms']:.3g} ms", f"{v['enqueue']['median_ms']:.3g} ms", f"{v['relative_error']:.0e}",
            ", ".join(f"{count} in {kind}" for kind, count in v["build"]["types"].items()),
            f"{v['build']['seconds']:.0f} s",
        ]
        for line in found
        for v in (line["values"],)
    ]  # fmt: skip
    head = ("device", "runtime", "precision", "batch", "latency", "without a graph", "largest difference",
            "convolutions and products", "build")  # fmt: skip
    text = "ResNet-50 at 224 × 224. *Difference*: of the outputs from PyTorch's float32, as a share of their scale."
    return _section("TensorRT's engines", head, rows, text)


def _rows(lines: Sequence[Line]) -> str:
    rows = []
    for line in figures(lines, ("tensorrt-rows",)):
        name, values = line["figure"], line["values"]
        if name.startswith("effort ") or name.endswith(" builders"):
            rows.append([*_where(line), name.removeprefix("effort "), f"{values['seconds_a_row']:.2f} s"])
    return _section("What a row of TensorRT costs", ("device", "runtime", "how", "a row"), rows)


def _solvers(lines: Sequence[Line]) -> str:
    rows = [
        [
            line["device"], line["figure"], f"{v['cpu_seconds']:.3f} s", f"{v['gpu_seconds']:.3f} s",
            "yes" if v.get("same_choices", v.get("same_counts")) else "no",
        ]
        for line in figures(lines, ("solvers",))
        for v in (line["values"],)
    ]  # fmt: skip
    return _section("Solvers", ("device", "instance", "CPU", "GPU", "equal answers"), rows)


def _training(lines: Sequence[Line]) -> str:
    rows = [
        [
            line["device"], f"{line['figure']}, batch {line['values']['batch']}", f"{plain['ms']:.1f} ms",
            f"{ours['ratio']:.3f}", f"{plain['peak_mib']:.0f} MiB", f"{ours['peak_mib']:.0f} MiB",
            f"{line['values']['solve_share']:.2%}",
        ]
        for line in figures(lines, ("training", "training-compiled"))
        for plain, ours in ((line["values"]["variants"]["plain"], line["values"]["variants"]["default"]),)
    ]  # fmt: skip
    head = ("device", "step", "plain", "with masks and importances", "peak", "with them",
            "a solve, by 80 steps")  # fmt: skip
    return _section("Training ResNet-50", head, rows)


def _compress(lines: Sequence[Line]) -> str:
    rows = [
        [
            line["device"],
            f"{line['values']['images']} images",
            name,
            f"{part['seconds']:.1f} s",
            f"{part['cpu']:.0%}",
        ]
        for line in figures(lines, ("compress",))
        if "parts" in line["values"]
        for name, part in line["values"]["parts"].items()
    ]
    text = "*CPU*: of one core, while the part runs."
    return _section("`compress` of ResNet-50", ("device", "data", "part", "time", "CPU"), rows, text)


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], text: str = "") -> str:
    return "\n\n".join(filter(None, [f"## {title}", text, table(head, rows)])) if rows else ""


def _where(line: Line) -> list[str]:
    versions = line["versions"]
    runtime = f"PyTorch {versions['torch']}"
    if not line["stage"].startswith("pytorch") and "tensorrt" in versions:
        runtime = f"TensorRT {versions['tensorrt']}"
    return [line["device"], runtime]


def _of(lines: Sequence[Line], line: Line, figure: str) -> Mapping[str, Any]:
    """Return another figure of the same stage and device."""
    same = [each for each in figures(lines, (line["stage"],), figure) if each["device"] == line["device"]]
    found: Mapping[str, Any] = same[-1]["values"]
    return found


def _all() -> Sequence[Any]:
    from gpu_hour.stages import STAGES

    return STAGES


# ---- into the documents ---------------------------------------------------------------------------------------

#: Document: what lies between its marks, if it is not the whole of it.
MARKED: dict[str, Callable[[Sequence[Line]], str]] = {
    "README.md": readme,
    "docs/results/index.md": sentence,
    "docs/guides/tensorrt.md": guide,
}
PAGE = "docs/results/gpu.md"
_FIRST, _LAST = "<!-- gpu: begin -->", "<!-- gpu: end -->"


def marked(text: str) -> str:
    """Return what lies between the marks of a document."""
    return text.partition(_FIRST)[2].partition(_LAST)[0].strip()


def write_pages(record: Path = RECORD, root: Path = ROOT) -> None:
    """Write the page, and what lies between the marks of the other documents."""
    lines = Record(record).lines
    (root / PAGE).write_text(page(lines), encoding="utf-8")
    for name, of in MARKED.items():
        path = root / name
        before, _, rest = path.read_text(encoding="utf-8").partition(_FIRST)
        old, _, after = rest.partition(_LAST)
        around = old[: len(old) - len(old.lstrip())]  # a mark inside a line, or on lines of their own
        path.write_text(f"{before}{_FIRST}{around}{of(lines)}{around}{_LAST}{after}", encoding="utf-8")
