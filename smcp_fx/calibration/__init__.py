"""Restores a pruned network's accuracy from data alone, without training."""

from smcp_fx.calibration.batch_norms import recalibrate
from smcp_fx.calibration.candidates import solve_best
from smcp_fx.calibration.compress import compress
from smcp_fx.calibration.gathering import gather_importance
from smcp_fx.calibration.repair import repair
from smcp_fx.calibration.side_by_side import LayerRepair, RepairReport

__all__ = [
    "LayerRepair",
    "RepairReport",
    "compress",
    "gather_importance",
    "recalibrate",
    "repair",
    "solve_best",
]
