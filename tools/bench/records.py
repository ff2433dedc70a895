"""Records of the latency benchmarks, and the pages made of them."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from smcp_fx.backends import Backend


class Record:
    """Lines of JSON, each written when it is known; a line that a killed run left unfinished is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            whole = [
                line
                for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
                if line.endswith("\n")
            ]
            self.lines = [json.loads(line) for line in whole]
            path.write_text("".join(whole), encoding="utf-8")

    def find(self, kind: str, **keys: Any) -> list[dict[str, Any]]:
        """The lines of a kind with these values."""
        return [
            line
            for line in self.lines
            if line["kind"] == kind and all(line.get(k) == v for k, v in keys.items())
        ]

    def add(self, kind: str, **values: Any) -> dict[str, Any]:
        """Write a line."""
        line = {"kind": kind, "time": time.time(), **values}
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return line


def begin(record: Record, backend: Backend) -> None:
    """Note the device and runtime; refuse a record of others."""
    versions = {
        name: version(name) for name in ("smcp_fx", "torch", "torchvision", "onnx", "onnxruntime", "numpy")
    }
    here = json.loads(json.dumps(backend.fingerprint().as_dict()))
    known = record.find("machine")
    if any(line["fingerprint"] != here for line in known):
        raise SystemExit(f"{record.path} is of another device or runtime: begin another record")
    if not known:
        record.add("machine", fingerprint=here, versions=versions,
                   system=platform.platform(), cache_bytes=backend.cache_bytes())  # fmt: skip


def fill(path: Path, name: str, text: str) -> None:
    """Put text between the marks of this name in a document; leave the rest alone."""
    first, last = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = path.read_text(encoding="utf-8") if path.exists() else f"# Latency\n\n{first}\n{last}\n"
    before, _, rest = old.partition(first)
    after = rest.partition(last)[2]
    path.write_text(f"{before}{first}\n\n{text}\n\n{last}{after}", encoding="utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))
