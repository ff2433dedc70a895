"""The pruning schedule: its phases, when a solve is due, and the targets of the ramp."""

from __future__ import annotations

from typing import Any

import pytest

from smcp_fx import Schedule
from smcp_fx.errors import InputError

FIELDS: dict[str, Any] = {
    "epochs": 10, "steps_per_epoch": 20, "warmup": 1, "ramp": 4, "cooldown": 3, "every": 7,
}  # fmt: skip


def test_phases() -> None:
    schedule = Schedule(**FIELDS)
    assert schedule.total_steps == 200
    assert schedule.first_step == 20
    assert schedule.ramp_end == 100
    assert schedule.last_step == 140


def test_fractions_of_epochs() -> None:
    schedule = Schedule(epochs=1.5, steps_per_epoch=10, warmup=0.25, ramp=0.5, cooldown=0.3, every=1)
    assert (schedule.total_steps, schedule.first_step) == (15, 2)
    assert (schedule.ramp_end, schedule.last_step) == (7, 12)


def test_solves_are_due_every_r_steps_and_at_the_end_of_pruning() -> None:
    due = [step for step in range(301) if Schedule(**FIELDS).due(step)]
    assert due == [*range(27, 140, 7), 140]


def test_the_ramp_is_exponential() -> None:
    """The FORCE scheduler: every step multiplies the target by the same factor, from full to final."""
    schedule = Schedule(**FIELDS)
    targets = [schedule.target(step, 8.0, 2.0) for step in range(200)]
    assert targets[:21] == [8.0] * 21
    assert targets[100:] == [2.0] * 100
    ratios = [targets[i + 1] / targets[i] for i in range(20, 100)]
    assert ratios == pytest.approx([0.25 ** (1 / 80)] * 80)
    assert targets[60] == pytest.approx(4.0)  # halfway: the geometric mean


def test_without_a_ramp_the_target_is_the_final_one_at_once() -> None:
    schedule = Schedule(**{**FIELDS, "ramp": 0})
    assert schedule.target(21, 8.0, 2.0) == 2.0


@pytest.mark.parametrize(
    ("epochs", "steps", "warmup", "ramp", "cooldown"),
    [(0.6, 10, 0.1, 0.2, 0.3), (1, 3, 0.5, 0.5, 0.0), (1, 5, 0.3, 0.3, 0.4), (3, 10, 1.1, 1.1, 0.8)],
)
def test_parts_that_fill_the_epochs_up_to_rounding(
    epochs: float, steps: int, warmup: float, ramp: float, cooldown: float
) -> None:
    """In floats they may add up to more, and rounded to steps, too: the last solve has the final target."""
    schedule = Schedule(epochs, steps, warmup, ramp, cooldown, every=1)
    assert schedule.ramp_end == schedule.last_step
    assert schedule.target(schedule.last_step, 8.0, 2.0) == 2.0


@pytest.mark.parametrize(("epochs", "steps"), [(90, 1000), (9, 100), (3, 37), (1, 10)])
def test_the_papers_schedule_scales(epochs: float, steps: int) -> None:
    schedule = Schedule.scaled(epochs, steps)
    total = epochs * steps
    assert schedule.first_step == pytest.approx(total * 10 / 90, abs=1)
    assert schedule.ramp_end == pytest.approx(total * 40 / 90, abs=1)
    assert schedule.last_step == pytest.approx(total * 45 / 90, abs=1)
    assert 1 <= schedule.every <= 80
    assert schedule.due(schedule.last_step)
    assert Schedule.scaled(epochs, steps, every=3).every == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epochs": float("nan")}, "finite"),
        ({"ramp": float("inf")}, "finite"),
        ({"ramp": "3"}, "ramp"),
        ({"warmup": None}, "warmup"),
        ({"cooldown": True}, "cooldown"),
        ({"epochs": 10**400}, "epochs"),
        ({"steps_per_epoch": "10"}, "steps_per_epoch"),
        ({"every": 2.5}, "every"),
        ({"epochs": 0}, "epochs > 0"),
        ({"steps_per_epoch": 0}, "steps_per_epoch >= 1"),
        ({"every": 0}, "every >= 1"),
        ({"warmup": -1}, "negative"),
        ({"warmup": 4}, "longer than the 10 epochs"),
        ({"warmup": 5, "ramp": 0, "cooldown": 5}, "no step"),
    ],
)
def test_schedules_that_make_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Schedule(**{**FIELDS, **fields})


@pytest.mark.parametrize(
    "fields", [{"epochs": "9"}, {"steps_per_epoch": 1.5}, {"every": 0}, {"every": "2"}], ids=str
)
def test_scaled_schedules_that_make_no_sense(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(fields))):
        Schedule.scaled(**{"epochs": 9, "steps_per_epoch": 100, **fields})
