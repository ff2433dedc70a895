"""The rooms of the house: which folder may import which, read from the syntax of every file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
#: Modules at the top of the package: those that import nothing of ours, and those that users call.
CONTRACTS = {"errors", "config", "cost_model", "schedule", "texts", "output_kinds"}
VERBS = {
    "analysis",
    "prepare",
    "model_summary",
    "prepared",
    "checkpoint",
    "proof",
    "outcomes",
    "own_class",
    "kept_channels",
    "carried_optimizers",
}

#: Room: the rooms that it may import, beside the contracts, which all may. A room stands below those it is listed in.
MAY_IMPORT = {
    "contracts": "",
    "storage": "",
    "masking": "",
    "tracing": "",
    "interface": "masking tracing",
    "channels": "masking tracing",
    "regions": "tracing",
    "knapsack": "",
    "allocation": "knapsack",
    "passes": "channels masking tracing",
    "costs": "channels tracing",
    "blocks": "passes channels tracing",
    "backends": "blocks interface tracing storage",
    "latency": "backends blocks costs allocation channels tracing storage",
    "pruning": "passes costs interface allocation channels storage",
    "serialization": "regions interface tracing storage",
    "verbs": "pruning serialization regions passes costs channels interface masking tracing storage",
    "calibration": "verbs regions pruning passes costs interface masking tracing",
    "smcp_fx": "training calibration verbs serialization latency pruning regions backends",
    "training": "verbs pruning interface tracing",
    "report": "storage",
    "zoo": "backends interface tracing",
    "inspection": "report zoo verbs channels interface",
    "compiler": "training calibration report zoo latency backends verbs serialization pruning costs storage",
    "recipes": "training report zoo latency backends verbs serialization pruning allocation storage",
    "integrations": "verbs pruning interface",
    "__main__": "",
    "cli": "recipes compiler inspection verbs zoo latency backends blocks channels tracing storage",
}


@cache
def modules() -> dict[str, Path]:
    """Dotted name: file, of all modules."""
    found = {}
    for folder, package in (("smcp_fx", ""), ("passes", "passes"), ("backends", "backends")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [
                part for part in (package, *path.relative_to(ROOT / folder).with_suffix("").parts) if part
            ]
            found[".".join(["smcp_fx", *(part for part in parts if part != "__init__")])] = path
    return found


@cache
def imports() -> dict[str, frozenset[str]]:
    """Module: the modules of ours that it imports, lazily and for type checking included."""
    return {name: frozenset(_imported(name, path)) for name, path in modules().items()}


def _imported(name: str, path: Path) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("smcp_fx"))
        elif isinstance(node, ast.ImportFrom):
            outer = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*outer, *filter(None, [node.module])])
            if source.startswith("smcp_fx"):
                for alias in node.names:
                    inner = f"{source}.{alias.name}"
                    yield inner if inner in modules() else source


def room_of(module: str) -> str:
    """The folder that a module is in; of those at the top, what they are."""
    first = module.split(".")[1] if "." in module else "smcp_fx"
    return "contracts" if first in CONTRACTS else "verbs" if first in VERBS else first


def arrows() -> dict[tuple[str, str], str]:
    """(room, room it imports): a sentence that says where."""
    return {
        (room_of(importer), room_of(imported)): f"{importer} imports {imported}"
        for importer, those in imports().items()
        for imported in those
        if room_of(importer) != room_of(imported)
    }


def test_every_room_imports_only_what_it_may() -> None:
    allowed = {(a, b) for a, rooms in MAY_IMPORT.items() for b in (*rooms.split(), "contracts")}
    assert [where for arrow, where in arrows().items() if arrow not in allowed] == []


def test_the_table_lists_every_room_and_no_arrow_that_is_gone() -> None:
    assert set(MAY_IMPORT) == {room_of(module) for module in modules()}
    listed = {(a, b) for a, rooms in MAY_IMPORT.items() for b in rooms.split()}
    assert listed - set(arrows()) == set()


def test_the_table_of_the_architecture_is_this_one() -> None:
    rows = [line.split("|") for line in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()]
    told: dict[str, set[str]] = {}
    for row in rows:
        if len(row) == 5 and (found := re.match(r" (?:`(?:smcp_fx/)?(\w+)/`|(contracts|verbs))", row[1])):
            told[found[1] or found[2]] = set(re.findall(r"\w+", row[3])) - {"nothing", "of", "ours"}
    ours = {room: set(rooms.split()) for room, rooms in MAY_IMPORT.items()}
    assert told == {room: rooms for room, rooms in ours.items() if room not in ("smcp_fx", "__main__")}


def test_every_pass_has_a_test_file_of_its_own() -> None:
    passes = [path.stem for path in (ROOT / "passes").glob("*.py") if _is_pass(path)]
    assert len(passes) > 8
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "passes").glob("test_*.py")}
    assert set(passes) - tested == set()


def _is_pass(path: Path) -> bool:
    """A pass is a class with the name of its file."""
    name = path.stem.title().replace("_", "")
    return f"class {name}(" in path.read_text(encoding="utf-8")


def test_imports_go_one_way() -> None:
    rooms = nx.DiGraph([(a, b) for a, those in MAY_IMPORT.items() for b in those.split()])
    assert list(nx.simple_cycles(rooms)) == []


def test_no_file_imports_itself_by_way_of_others() -> None:
    files = nx.DiGraph([(a, b) for a, those in imports().items() for b in those if a != b])
    assert [sorted(part) for part in nx.strongly_connected_components(files) if len(part) > 1] == []


def test_every_folder_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {name if path.name == "__init__.py" else None for name, path in modules().items()} - {None}
    assert set(settings["tool"]["setuptools"]["packages"]) == folders


@pytest.mark.parametrize("name", sorted(MAY_IMPORT.keys() - {"contracts", "verbs"}))
def test_every_room_says_what_it_is(name: str) -> None:
    file = modules()["smcp_fx" if name == "smcp_fx" else f"smcp_fx.{name}"]
    assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
