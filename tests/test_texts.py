"""How amounts are written, in messages, reports and pages alike."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: A number with a space before its per cent sign.
SPACED = re.compile("[0-9][ \N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}]%")


def strings(code: str) -> Iterator[str]:
    """The texts of a module; what is filled in stands as 0."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "0" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_a_spaced_percentage_is_seen() -> None:
    for code in ('f"{x:.1f} % of it"', '"40 %"', 'f"{a} and" f" 40\N{NO-BREAK SPACE}%"'):
        assert any(SPACED.search(text) for text in strings(code)), code
    assert not any(SPACED.search(text) for text in strings('f"{x:.1%} at {5 % 3}, accuracy, %"'))


@pytest.mark.parametrize("folder", ["smcp_fx", "passes", "backends", "tools", "examples"])
def test_percentages_in_code_have_no_space(folder: str) -> None:
    wrong = [
        f"{path}: {text}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for text in strings(path.read_text(encoding="utf-8"))
        if SPACED.search(text)
    ]
    assert not wrong


def test_percentages_in_other_files_have_no_space() -> None:
    kinds = {".md", ".svg", ".toml", ".js", ".css"}
    folders = [ROOT / name for name in ("docs", "smcp_fx")]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in kinds]
    files += sorted(ROOT.glob("*.md"))
    assert [str(path) for path in files if SPACED.search(path.read_text(encoding="utf-8"))] == []
