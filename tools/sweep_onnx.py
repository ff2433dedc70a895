"""Import ONNX files, compare them in ONNX Runtime, prune them to 70% of the FLOPs, repair and export them again.

    python tools/sweep_onnx.py [--files FILE ...] [--only TEXT] [--record FILE] [--again]
    python tools/sweep_onnx.py --reports REPORT.json ...

Without --files: torchvision's, timm's and transformers' networks by both of PyTorch's exporters, a tagger, a U-Net
with open height and width, a file in half precision and one with its weights beside it. Each file runs in a process
of its own. A line of JSON is written the moment a result is there; a file that has a line is not run again, unless
--again says so. --reports notes what runs of smcp-compile on ONNX files measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from trying import run_apart  # noqa: E402

RECORD = HERE.parent / "docs" / "records" / "onnx_files.jsonl"
LATENCY = RECORD.with_name("onnx_latency.jsonl")
PAGE = HERE.parent / "docs" / "results" / "onnx_files.md"
#: Exporter and opset; the first two are pruned, the others imported and prepared.
_WAYS = (("script", 13), ("dynamo", 18), ("script", 11), ("script", 17), ("script", 20), ("dynamo", 20))
_TIMM_WAYS = (("script", 17), ("dynamo", 18))
_TORCHVISION = (
    "resnet18", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "densenet121", "squeezenet1_1",
    "shufflenet_v2_x0_5", "regnet_y_400mf", "convnext_tiny", "vgg11_bn", "mnasnet0_5", "swin_t",
)  # fmt: skip
_TIMM = (
    "vit_tiny_patch16_224", "convnext_atto", "ghostnet_100", "levit_128s", "edgenext_xx_small", "poolformer_s12",
    "mixer_s32_224", "repvgg_a0", "efficientformerv2_s0", "mobilevit_xxs", "gmlp_ti16_224", "res2net50_14w_8s",
)  # fmt: skip
_TRANSFORMERS = ("vit", "segformer", "detr")
#: What these names hold takes images of no other size, or TorchScript's exporter does.
_OF_224 = ("224", "levit", "efficientformer", "swin", "vgg")
#: These are too wide to be pruned in minutes on one core; they are read, compared and prepared.
_WIDE = ("convnext_tiny", "vgg", "swin", "mixer", "gmlp", "repvgg", "res2net", "efficientformer")
#: Target of the pruning, a share of the FLOPs; inputs that it is repaired on; seconds of one file.
TARGET, _BATCHES, _LIMIT = 0.7, 2, 900


def main() -> int:
    """Run the files without a line. Exit code 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", nargs="+", type=Path, default=[], help="files to run instead of the list")
    parser.add_argument("--only", default="", help="files whose name holds this")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--again", action="store_true", help="run files that have a line, too")
    parser.add_argument(
        "--reports", nargs="+", type=Path, default=[], help="reports of runs to note, no files"
    )
    options = parser.parse_args()
    if options.reports:
        with LATENCY.open("a") as file:
            file.writelines(
                json.dumps(_measured(json.loads(path.read_text()))) + "\n" for path in options.reports
            )
    lines = options.record.read_text().splitlines() if options.record.exists() else []
    known = {row["key"]: row for row in map(json.loads, lines)}
    listed = {file.name: _given(file) for file in options.files}
    if not (listed or options.reports):
        listed = makers()
    for key, (maker, prunes) in listed.items():
        if options.only not in key or (key in known and not options.again):
            continue
        known[key] = row = run_apart(key, _LIMIT, functools.partial(run, key, maker, prunes))
        with options.record.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    if options.record == RECORD:
        PAGE.write_text(page(known))
    return int(any(row["status"] not in ("exact", "refused", "not exported") for row in known.values()))


def page(rows: dict[str, dict[str, Any]]) -> str:
    """Return the document: a line a network, what was read of each exporter's files, and what was pruned."""
    networks: dict[str, list[dict[str, Any]]] = {}
    for key, row in rows.items():
        networks.setdefault(key.split(" ")[0], []).append(row)
    lines = [
        "# ONNX files",
        "",
        "Written by `python tools/sweep_onnx.py`, with `--files` for those that packages hold. Each file is",
        "read by `from_onnx`, which compares it with ONNX Runtime, and prepared. Those with a share of the FLOPs",
        "were pruned to 70% of them or less, repaired, exported, and compared again. Weights are random but for",
        "the OCR files (yolov8n_nms: scaled, so that it detects); *script* and *dynamo* are PyTorch's exporters,",
        "with the opset.",
        "",
        "| file | read and compared | free | pruned to | not |",
        "|---|---|---|---|---|",
    ]
    for name, found in networks.items():
        exact = [row["key"].partition(" ")[2] or "yes" for row in found if row["status"] == "exact"]
        others = [
            f"{row['key'].partition(' ')[2]} {row['status']}: {row['why'][:120]}"
            for row in found
            if row["status"] != "exact"
        ]
        free = min((row["free"] for row in found if "free" in row), default=None)
        pruned = sorted({f"{row['flops']:.0%}" for row in found if "flops" in row})
        told = " ".join("; ".join(others).replace("|", "/").split())
        shown = "" if free is None else f"{free:.3f}"
        lines.append(f"| {name} | {', '.join(exact)} | {shown} | {', '.join(pruned)} | {told} |")
    return "\n".join([*lines, *_by_latency(), *_beside_onnxsim()]) + "\n"


def _measured(report: dict[str, Any]) -> dict[str, Any]:
    """Return what the record keeps of a run's report."""
    dense, pruned = report["dense"], report["pruned"]
    if not (dense["latency_stable"] and pruned["latency_stable"]):
        raise SystemExit("other work disturbed the timings: measure again")
    return {
        "file": Path(report["model"].partition(":")[2]).name,
        "target": report["target_fraction"],
        "measured": round(report["measured_fraction"], 5),
        "dense_ms": round(dense["latency_ms"], 3),
        "pruned_ms": round(pruned["latency_ms"], 3),
        "flops": round(pruned["flops"] / dense["flops"], 4),
        "agreement": round(pruned["accuracy"], 4),
        "runtime": f"{report['backend']['runtime']} {report['backend']['version']}",
        "device": report["backend"]["device"],
    }


def _by_latency() -> list[str]:
    """Return the part on runs that `--reports` noted."""
    lines = [
        "",
        "## To a measured latency",
        "",
        "`smcp-compile --epochs 0` on the OCR files and text lines, one in five held out; noted by",
        "`tools/sweep_onnx.py --reports`. One thread, a batch of one; agreement is that of held-out lines.",
        "",
        "| file | target | measured | ms | FLOPs | agreement | in |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in map(json.loads, LATENCY.read_text().splitlines()):
        lines.append(
            f"| {row['file']} | {row['target']:.0%} | {row['measured']:.1%} | {row['dense_ms']:g} to "
            f"{row['pruned_ms']:g} | {row['flops']:.1%} | {row['agreement']:.1%} | "
            f"{row['runtime']}, {row['device']} |"
        )
    return lines


def _beside_onnxsim() -> list[str]:
    """Return the part on what `compare_onnxsim.py` recorded."""
    lines = [
        "",
        "## Beside onnxsim",
        "",
        "Written by `python tools/compare_onnxsim.py`: the OCR files with their own weights, on text lines, half of",
        "them to calibrate (the classifier's turned by 180 degrees, every other pair) and half to compare with the",
        "whole file. onnxsim 0.8.1 takes channels out by norms, one layer and its reader at a time, of equal shares",
        "everywhere; its fine-tuning fits linear layers alone. Where its largest share leaves more than 70% of the",
        "FLOPs, that is told. Agreement is the share of equal classes, the recogniser's at each position; of the",
        "detector's map, 1 less the squared error relative to its variance.",
        "",
        "| file | method | FLOPs | measured latency | agreement |",
        "|---|---|---|---|---|",
    ]
    for row in map(json.loads, (RECORD.parent / "onnxsim.jsonl").read_text().splitlines()):
        if "least" in row:
            found = f"{row['least']:.1%} at the least | |"
        else:
            found = f"{row['flops']:.1%} | {row['latency']:.1%} | {row['agreement']:.1%}"
        lines.append(f"| {row['file']} | {row['method']} | {found} |")
    return lines


Maker = Callable[[Path], Path]


def _given(file: Path) -> tuple[Maker, bool]:
    return lambda folder: file.resolve(), True


def makers() -> dict[str, tuple[Maker, bool]]:
    """Return what writes each file into a folder, by name, and whether the file is pruned."""
    found: dict[str, tuple[Maker, bool]] = {}
    for library, names, ways in (
        ("torchvision", _TORCHVISION, _WAYS), ("timm", _TIMM, _TIMM_WAYS),
        ("transformers", _TRANSFORMERS, _TIMM_WAYS),
    ):  # fmt: skip
        for name in names:
            for index, (exporter, opset) in enumerate(ways):
                key = f"{library}:{name} {exporter} {opset}"
                prunes = index < 2 and not any(part in name for part in _WIDE)
                found[key] = (_exported(f"{library}:{name}", exporter, opset), prunes)
    for key in ("tagger", "unet", "half", "external"):
        found[key] = (lambda folder, key=key: _special(key, folder), True)  # type: ignore[misc]
    return found


def _exported(spec: str, exporter: str, opset: int) -> Maker:
    def write(folder: Path) -> Path:
        from model_libraries import build
        from onnx_networks import Tensors
        from random_weights import randomise

        from smcp_fx.zoo.models import build_model

        library, _, name = spec.partition(":")
        model = Tensors(build(library, name)) if library == "transformers" else build_model(spec)
        randomise(model.eval())
        side = 224 if any(part in name for part in _OF_224) else 64 if library == "transformers" else 128
        return export(model, side, folder, exporter, opset)

    return write


def export(
    model: Any, inputs: Any, folder: Path, exporter: str, opset: int, axes: Any = None, **more: Any
) -> Path:
    """Write a file with PyTorch's exporter; the batch is open unless ``axes`` says otherwise."""
    import torch

    example = torch.randn(2, 3, inputs, inputs) if isinstance(inputs, int) else inputs
    path = folder / "net.onnx"
    axes = {"x": {0: "batch"}} if axes is None else axes
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        if exporter == "script":
            torch.onnx.export(
                model, (example,), path, dynamo=False, opset_version=opset, input_names=["x"],
                dynamic_axes=axes, **more,
            )  # fmt: skip
        else:
            open_axes = dict.fromkeys(axes["x"], torch.export.Dim.DYNAMIC)
            torch.onnx.export(
                model, (example,), path, dynamo=True, opset_version=opset, input_names=["x"],
                dynamic_shapes=(open_axes,), verbose=False, **more,
            )  # fmt: skip
    return path


def _special(key: str, folder: Path) -> Path:
    import onnx
    import torch
    from onnx_networks import Tagger, UNet

    torch.manual_seed(0)
    if key == "tagger":
        return export(
            Tagger().eval(), torch.randint(0, 50, (2, 12)), folder, "script", 17, {"x": {0: "b", 1: "t"}}
        )
    if key == "unet":
        return export(UNet().eval(), 64, folder, "script", 17, {"x": {0: "b", 2: "h", 3: "w"}})
    if key == "half":
        return export(UNet().eval().half(), torch.randn(2, 3, 64, 64).half(), folder, "dynamo", 18)
    path = export(UNet().eval(), 64, folder, "script", 17)
    model = onnx.load(path)
    path.unlink()
    onnx.save(model, path, save_as_external_data=True, location="net.weights", size_threshold=0)
    return path


def run(key: str, maker: Maker, prunes: bool) -> dict[str, Any]:
    """Write, import, prune, repair and export a file."""
    import torch

    import smcp_fx

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    row: dict[str, Any] = {"key": key}
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = maker(Path(folder))
        except Exception as error:
            return row | {"status": "not exported", "why": f"{type(error).__name__}: {str(error)[:200]}"}
        began = time.perf_counter()
        try:
            model = smcp_fx.from_onnx(path)
            row["import_s"] = round(time.perf_counter() - began, 2)
            inputs = model.example_input_array
            row |= {"inputs": [list(t.shape) for t in inputs], "nodes": len(model.graph.nodes)}
            prepared = smcp_fx.prepare(model, inputs, target=TARGET)
            row["free"] = round(prepared.channels.free_share, 4)
            if prunes:
                row |= _pruned(prepared, model, Path(folder))
            row["status"] = "exact"
        except smcp_fx.SmcpError as error:
            refused = "quantised" in str(error)
            row |= {
                "status": "refused" if refused else "failed",
                "why": f"{type(error).__name__}: {str(error).replace(str(path), path.name)[:400]}",
            }
        except Exception as error:
            row |= {"status": "crashed", "why": f"{type(error).__name__}: {str(error)[:400]}"}
        row["seconds"] = round(time.perf_counter() - began, 1)
    return row


def _pruned(prepared: Any, model: Any, folder: Path) -> dict[str, Any]:
    """Prune a prepared network to the target, repair it, and export it, which compares it in ONNX Runtime."""
    import smcp_fx

    interface = model.meta["onnx"]
    shapes = tuple(tuple(t.shape) for t in model.example_input_array)
    batches = [(interface.random_inputs(shapes, seed), None) for seed in range(_BATCHES)]
    smcp_fx.gather_importance(prepared, batches, outputs="values")
    prepared.pruner.solve()
    smaller = smcp_fx.convert(prepared)
    smcp_fx.repair(smaller, prepared, batches)
    share = prepared.pruner.present_cost / prepared.pruner.full_cost
    opened = all(port.open_axes.get(0) for port in interface.inputs)
    smcp_fx.export_onnx(
        smaller, model.example_input_array, folder / "pruned.onnx", dynamic_batch=opened,
        input_names=[port.name for port in interface.inputs],
    )  # fmt: skip
    return {"flops": round(share, 4)}


if __name__ == "__main__":
    sys.exit(main())
