"""The tables of the paper (Humble et al., ECCV 2022), figure by figure as printed there.

FLOPs are multiply-adds, accuracies percent, FPS images a second on a TITAN V; None where the paper has none.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperRow:
    """A row: its ``method`` and the figures of the table's columns; ``divider``: a line stands before it."""

    method: str
    figures: tuple[float | str | None, ...]
    divider: bool = False


@dataclass(frozen=True)
class PaperTable:
    """A table: ``columns`` names its figures, as records name them; ``flops_unit`` is what FLOPs are counted in."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[PaperRow, ...]
    flops_unit: float = 1e9


def _rows(*groups: tuple[tuple[object, ...], ...]) -> tuple[PaperRow, ...]:
    found = []
    for group in groups:
        for index, (method, *figures) in enumerate(group):
            found.append(PaperRow(str(method), tuple(figures), divider=index == 0))  # type: ignore[arg-type]
    return tuple(found)


_FIVE = ("flops", "top1", "top5", "fps", "speedup")
_FOUR = ("flops", "top1", "fps", "speedup")

TABLES: dict[str, PaperTable] = {
    "resnet50": PaperTable(
        "Table 1: ResNet-50 on ImageNet, PyTorch baseline",
        _FIVE,
        _rows(
            (("No pruning", 4.1, 76.2, 92.87, 1019, 1.0),),
            (
                ("ThiNet-70", 2.9, 75.8, 90.67, None, None),
                ("AutoSlim", 3.0, 76.0, None, 1215, 1.14),
                ("MetaPruning", 3.0, 76.2, None, None, None),
                ("GReg-1", 2.7, 76.3, None, 1171, 1.15),
                ("HALP-80%", 3.1, 77.2, 93.47, 1256, 1.23),
                ("SMCP-80%", 3.0, 77.1, 93.43, 1292, 1.27),
            ),
            (
                ("0.75x ResNet50", 2.3, 74.8, None, 1467, 1.44),
                ("ThiNet-50", 2.1, 74.7, 90.02, None, None),
                ("AutoSlim", 2.0, 75.6, None, 1592, 1.56),
                ("MetaPruning", 2.0, 75.4, None, 1604, 1.58),
                ("GBN", 2.4, 76.2, 92.83, None, None),
                ("GReg-2", 1.8, 75.4, None, 1414, 1.39),
                ("HALP-55%", 2.0, 76.5, 93.05, 1630, 1.60),
                ("SMCP-55%", 2.0, 76.8, 93.22, 1673, 1.64),
            ),
            (
                ("0.50x ResNet50", 1.1, 72.0, None, 2498, 2.45),
                ("ThiNet-30", 1.2, 72.1, 88.30, None, None),
                ("AutoSlim", 1.0, 74.0, None, 2390, 2.45),
                ("MetaPruning", 1.0, 73.4, None, 2381, 2.34),
                ("GReg-2", 1.3, 73.9, None, 1514, 1.49),
                ("HALP-30%", 1.0, 74.3, 91.81, 2755, 2.70),
                ("SMCP-30%", 1.0, 74.6, 92.00, 2947, 2.89),
            ),
        ),
    ),
    "resnet50-eagleeye": PaperTable(
        "Table 1: ResNet-50 on ImageNet, EagleEye baseline",
        _FIVE,
        _rows(
            (("No pruning", 4.1, 77.2, 93.70, 1019, 1.0),),
            (
                ("EagleEye-3G", 3.0, 77.1, 93.37, 1165, 1.14),
                ("HALP-80%", 3.0, 77.5, 93.60, 1203, 1.18),
                ("SMCP-80%", 3.1, 77.6, 93.61, 1263, 1.23),
            ),
            (
                ("EagleEye-2G", 2.1, 76.4, 92.89, 1471, 1.44),
                ("HALP-55%", 2.1, 76.6, 93.16, 1672, 1.64),
                ("SMCP-50%", 1.9, 76.6, 93.17, 1706, 1.67),
            ),
            (
                ("EagleEye-1G", 1.0, 74.2, 91.77, 2429, 2.38),
                ("HALP-30%", 1.2, 74.5, 91.87, 2597, 2.55),
                ("SMCP-30%", 1.1, 75.1, 92.29, 2589, 2.51),
                ("SMCP-25%", 0.9, 74.4, 91.98, 3102, 3.01),
            ),
        ),
    ),
    "resnet101": PaperTable(
        "Table 1: ResNet-101 on ImageNet",
        _FOUR,
        _rows(
            (("No pruning", 7.8, 77.4, 620, 1.0),),
            (
                ("Taylor-75%", 4.7, 77.4, 750, 1.21),
                ("HALP-60%", 4.3, 78.3, 847, 1.37),
                ("SMCP-60%", 4.0, 78.1, 951, 1.53),
                ("HALP-50%", 3.6, 77.8, 994, 1.60),
                ("SMCP-50%", 3.6, 77.8, 1016, 1.64),
            ),
            (
                ("Taylor-55%", 2.9, 76.0, 908, 1.47),
                ("HALP-40%", 2.7, 77.2, 1180, 1.90),
                ("SMCP-30%", 2.6, 77.3, 1273, 2.05),
                ("HALP-30%", 2.0, 76.5, 1521, 2.45),
                ("SMCP-25%", 2.0, 76.8, 1535, 2.48),
            ),
        ),
    ),
    "mobilenet-v1": PaperTable(
        "Table 1: MobileNet-V1 on ImageNet",
        _FOUR,
        _rows(
            (("No pruning", 569, 72.6, 3415, 1.0),),
            (
                ("0.75x MobileNetV1", 325, 68.4, 4678, 1.37),
                ("NetAdapt", 284, 69.1, None, None),
                ("MetaPruning", 316, 70.9, 4838, 1.42),
                ("EagleEye", 284, 70.9, 5020, 1.47),
                ("HALP-60%", 297, 71.3, 5754, 1.68),
                ("SMCP-60%", 356, 71.0, 5870, 1.72),
            ),
            (
                ("MetaPruning", 142, 66.1, 7050, 2.06),
                ("AutoSlim", 150, 67.9, 7743, 2.27),
                ("HALP-42%", 171, 68.3, 7940, 2.32),
                ("SMCP-40%", 208, 68.3, 8163, 2.39),
            ),
        ),
        flops_unit=1e6,
    ),
    # The paper shows detection as a plot (figure 2, right); these figures are from its text.
    "voc": PaperTable(
        "Section 4.2: SSD512-RN50 on PASCAL VOC 07+12, against SSD300-RN50",
        ("mAP_gain", "fps_gain", "speedup"),
        _rows((("SMCP-25%", 2.63, 12.0, 2.12),)),
    ),
    "knapsack": PaperTable(
        "Table 2: time to solve the multiple-choice knapsack of a ResNet-50",
        ("exactness", "seconds"),
        _rows(
            (
                ("DP (s=10)", "1 decimal", "< 1"),
                ("DP (s=100)", "2 decimals", "about 6"),
                ("DP (s=500)", "2-3 decimals", "about 30"),
                ("DP (s=1000)", "3 decimals", "about 70"),
                ("Algorithm 2", "machine roundoff", "< 1"),
            ),
            (("smcp_fx", None, None),),
        ),
    ),
}
