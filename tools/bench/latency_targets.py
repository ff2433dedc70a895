"""How the latency benchmark seeks a target: it solves, measures, and solves again, as the compiler does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from smcp_fx.compiler.measuring import TRIES, aim_for, is_met

Counts = Mapping[str, int]
#: What is known of a measured network: its fraction of the dense latency, the standard error of that, and more.
Found = dict[str, Any]


def seek(
    asked: float,
    solve: Callable[[float], Counts],
    predict: Callable[[Counts], float],
    measure: Callable[[Counts], Found],
    measure_file: Callable[[Counts], Found],
) -> tuple[Found, Counts]:
    """Ask for a fraction of the dense latency up to `TRIES` + 1 times; return what the file that counts is like.

    ``solve``: counts predicted to take about a fraction; ``predict``: the fraction they are predicted to take.
    ``measure`` times the network on the way, with other weights, for which no export is needed, and
    ``measure_file`` the emitted file in a session of its own. A file is measured where its network meets the target;
    where the file misses, another network is tried. Where none meets it, the nearest network's file is measured, too,
    and the nearest file counts. Both measurements of a choice teach the next aim.

    Returns: of the file that counts what was measured, with ``tried`` (every solve's network), ``kept`` (whose file
    counts), ``predicted`` and ``files`` (how many were measured); and its counts.
    """
    chosen: list[Counts] = []
    tried: list[Found] = []
    files: dict[int, Found] = {}
    known: list[tuple[float, float]] = []
    aim = asked
    for number in range(TRIES + 1):
        counts = solve(aim)
        predicted = predict(counts)
        chosen.append(counts)
        tried.append({**measure(counts), "predicted": predicted})
        known.append((predicted, tried[-1]["measured"]))
        if _meets(tried[-1], asked):
            files[number] = measure_file(counts)
            if _meets(files[number], asked):
                break
            known.append((predicted, files[number]["measured"]))
        aim = aim_for(asked, known)
    if not any(_meets(file, asked) for file in files.values()):
        others = [i for i in range(len(tried)) if i not in files]
        nearest = min(others, key=lambda i: abs(tried[i]["measured"] - asked), default=None)
        if nearest is not None:
            files[nearest] = measure_file(chosen[nearest])
    kept = min(files, key=lambda i: abs(files[i]["measured"] - asked))
    told = {"tried": tried, "kept": kept, "predicted": tried[kept]["predicted"], "files": len(files)}
    return {**told, **files[kept]}, chosen[kept]


def _meets(found: Found, asked: float) -> bool:
    return is_met(found["measured"] - asked, found["error"])
