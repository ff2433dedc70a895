"""The report of a compile run: `report.json`, a self-contained `report.html`, and the printed table."""

from smcp_fx.report.schema import Report
from smcp_fx.report.summary import summary_table
from smcp_fx.report.without_training import target_table
from smcp_fx.report.write import write_report

__all__ = ["Report", "summary_table", "target_table", "write_report"]
