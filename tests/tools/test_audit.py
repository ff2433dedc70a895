"""tools/audit.py: an advisory fails, a registry that does not answer does not."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "audit.py"


@pytest.fixture
def audit() -> Any:
    spec = importlib.util.spec_from_file_location("audit", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_advisory_fails_and_unknown_packages_are_counted(
    audit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = {"name": "a", "version": "1", "vulns": []}
    unknown = {"name": "b", "skip_reason": "not found"}
    bad = {"name": "c", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
    assert audit.tell([sound, unknown]) == 0
    assert "0 advisories; the registry knows 1 of 2" in capsys.readouterr().out
    assert audit.tell([sound, unknown, bad]) == 1
    assert "c 2: CVE-1, fixed in 3" in capsys.readouterr().out


def test_a_registry_that_does_not_answer_is_told(
    audit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ran(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(
            command, 1, "", "Traceback\nConnectionError: no route to pypi.org\n"
        )

    monkeypatch.setattr(audit.subprocess, "run", ran)
    assert audit.main() == 0
    assert "not done, the registry cannot be asked: ConnectionError" in capsys.readouterr().out
