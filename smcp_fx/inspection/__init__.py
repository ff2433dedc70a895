"""Views of a network's channel graph: as text, as a page, as files for other tools."""

from smcp_fx.inspection.description import Inspection, describe, inspect_model

__all__ = ["Inspection", "describe", "inspect_model"]
