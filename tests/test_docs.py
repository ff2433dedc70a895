"""The docs are right: their Python runs, their commands parse, and their includes exist."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import smcp_fx
from smcp_fx.report.schema import Report, Side

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page for folder in ("start", "guides") for page in (DOCS / folder).glob("*.md"))
_BLOCK = re.compile(
    r"(<!-- not run here: [^>]+ -->\n)?^ *```(\w+)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE
)
_INCLUDED = re.compile(r'^ *--8<-- "([^":]+):(\w+)"$', re.MULTILINE)
_COMMANDS = ("smcp-compile", "smcp-inspect", "smcp-table", "smcp-train", "smcp-trt-worker")

sys.path.insert(0, str(ROOT / "tools"))
from docs_hook import help_of, on_page_markdown  # noqa: E402

sys.path.pop(0)


def section(match: re.Match[str]) -> str:
    """The named section of a file, as MkDocs includes it."""
    text = (ROOT / match[1]).read_text(encoding="utf-8")
    inside = re.search(
        rf"# --8<-- \[start:{match[2]}\]\n(.*?)^ *# --8<-- \[end:{match[2]}\]", text, re.DOTALL | re.MULTILINE
    )
    assert inside is not None, f"{match[1]} has no section {match[2]}"
    lines = inside[1].splitlines()
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    return "\n".join(line[margin:] for line in lines)


def blocks(page: Path, language: str) -> Iterator[tuple[bool, str]]:
    """Every block of a language: whether it is run, and its text with what it includes."""
    for skipped, kind, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == language:
            yield not skipped, _INCLUDED.sub(section, textwrap.dedent(text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_in_order(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a reader copies them: from the top, into an empty folder."""
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {"__name__": "page"}
    for number, (runs, text) in enumerate(blocks(page, "python"), 1):
        code = compile(text, f"{page.name}, block {number}", "exec")  # what is not run parses, too
        if runs:
            exec(code, known)  # noqa: S102 - our own pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_defines_the_names_that_it_uses(page: Path) -> None:
    """In the blocks that are not run, too."""
    text = "\n".join(text for _, text in blocks(page, "python"))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--quiet", "-"]
    found = subprocess.run(ruff, input=text, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command line of ours on a page."""
    for _, text in blocks(page, "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            words = line.split(" #")[0].split()
            if words and words[0] in _COMMANDS:
                yield words


def test_flags_on_the_pages_are_those_of_the_commands() -> None:
    seen, known = set(), {}
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for words in commands(page):
            of = tuple(words[:2]) if words[0] == "smcp-table" else tuple(words[:1])
            if of not in known:
                known[of] = set(re.findall(r"--[\w-]+", help_of(*of)))
            flags = {word.split("=")[0] for word in words if word.startswith("--")}
            assert flags <= known[of], f"{page.name}: {' '.join(words)}"
            seen.add(words[0])
    assert seen >= {"smcp-compile", "smcp-inspect", "smcp-table", "smcp-train"}


def test_marks_are_filled_from_the_code() -> None:
    filled = on_page_markdown(
        "::: smcp_fx.prepare.prepare\n\n<!-- other names -->\n<!-- options: PruningConfig -->\n"
        "<!-- fields of report.json -->"
    )
    listed = set(re.findall(r"::: smcp_fx\.(?:prepare\.)?(\w+)", filled))
    assert listed == set(smcp_fx.__all__) - set(vars(smcp_fx.errors))
    assert "| `multiple` | `8` |" in filled
    assert all(f"| `{field.name}` |" in filled for kind in (Report, Side) for field in fields(kind))


def test_relative_links_of_pages_outside_the_site_resolve() -> None:
    for page in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "ARCHITECTURE.md",
        ROOT / "CHANGELOG.md",
    ):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{page.name} links to {target}"


def test_the_example_of_a_rule_is_the_rule() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.S)
    files = ("smcp_fx/channels/rules_windows.py", "tests/models_windows.py")
    code = "".join((ROOT / name).read_text(encoding="utf-8") for name in files)
    assert len(blocks) == 3 and all(block in code for block in blocks)
