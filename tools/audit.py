"""Known vulnerabilities of what is installed here, by pip-audit.

    python tools/audit.py

Exit code 1 if a package has one. 0 if none has, or if the registry cannot be asked, which is printed: a mirror may
know packages but not their advisories.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    """Run pip-audit and report."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "audit.json"
        command = [sys.executable, "-m", "pip_audit", "--skip-editable", "--progress-spinner", "off"]
        ran = subprocess.run(
            [*command, "--format", "json", "--output", str(file)], capture_output=True, text=True
        )
        if not file.exists():
            last = (ran.stderr.strip().splitlines() or ["nothing was said"])[-1]
            print(f"audit: not done, the registry cannot be asked: {last[:300]}")
            return 0
        packages = json.loads(file.read_text(encoding="utf-8"))["dependencies"]
    return tell(packages)


def tell(packages: list[dict[str, object]]) -> int:
    """Print the advisories of pip-audit's ``packages``, and how many of them the registry knows."""
    known = [package for package in packages if "skip_reason" not in package]
    found = [(package, one) for package in known for one in package["vulns"]]  # type: ignore[attr-defined]
    for package, one in found:
        fixed = ", ".join(one["fix_versions"]) or "no version yet"
        print(f"audit: {package['name']} {package['version']}: {one['id']}, fixed in {fixed}")
    print(f"audit: {len(found)} advisories; the registry knows {len(known)} of {len(packages)} packages")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
