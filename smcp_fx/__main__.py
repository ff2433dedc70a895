"""``python -m smcp_fx compile ...``: the command lines, if their scripts are not on the path."""

from __future__ import annotations

import importlib
import sys

_COMMANDS = {
    "compile": "make a network as fast as asked",
    "inspect": "show which channels go together, and what must stay",
    "table": "measure, show and exchange latency tables",
    "train": "run the paper's experiments",
}


def main() -> int:
    """Run the command that the first argument names, or list the commands."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in _COMMANDS:
        from importlib.metadata import version

        print(f"smcp_fx {version('smcp_fx')}")
        for command, purpose in _COMMANDS.items():
            print(f"  python -m smcp_fx {command:<8} {purpose}")
        return 0 if name in ("--version", "--help", "-h") else 2
    sys.argv = [f"smcp-{name}", *sys.argv[2:]]
    code: int = importlib.import_module(f"smcp_fx.cli.{name}").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
