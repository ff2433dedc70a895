"""Measure, show, join, exchange and check latency tables; the same as the console command smcp-table."""

import sys

from smcp_fx.cli.table import main

if __name__ == "__main__":
    sys.exit(main())
