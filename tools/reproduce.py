"""Print the paper's tables with our figures where they were run, and "not run" elsewhere.

    python tools/reproduce.py resnet50
    python tools/reproduce.py all --records docs/records/paper

Our figures come from the records (record.json) that runs of whole recipes wrote, put into --records.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from smcp_fx.cli.common import consoles, guarded

_RECORDS = Path(__file__).parent.parent / "docs" / "records" / "paper"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from smcp_fx.recipes.paper import TABLES
    from smcp_fx.recipes.record import read_records
    from smcp_fx.recipes.reproduce import print_table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=(*TABLES, "all"), help="which table of the paper")
    parser.add_argument("--records", type=Path, default=_RECORDS, metavar="FOLDER",
                        help="where the records lie (default: docs/records/paper)")  # fmt: skip
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args(argv)
    console, problems = consoles()

    def run() -> int:
        records = read_records(arguments.records)
        for name in TABLES if arguments.table == "all" else (arguments.table,):
            print_table(name, records, console)
        return 0

    return guarded("reproduce", run, problems, debug=arguments.debug)


if __name__ == "__main__":
    sys.exit(main())
