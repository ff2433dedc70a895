"""Inverses of covariances of which little but rounding is left."""

from __future__ import annotations

import torch

from smcp_fx.calibration.elimination import _inverse


def test_rounding_beyond_the_estimate_is_ridged_away() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 40, 40, generator=generator, dtype=torch.float64)
    covariance = 1e-7 * (noise + noise.mT)  # indefinite, as differences of rounded products are
    found = _inverse(covariance, torch.full((2,), 1e-8, dtype=torch.float64))
    assert bool((torch.linalg.eigvalsh(found) > 0).all())


def test_a_definite_matrix_is_inverted_as_it_is() -> None:
    factor = torch.randn(1, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    covariance = factor @ factor.mT + torch.eye(9, dtype=torch.float64)
    found = _inverse(covariance, torch.ones(1, dtype=torch.float64))
    torch.testing.assert_close(
        found @ covariance, torch.eye(9, dtype=torch.float64)[None], rtol=1e-9, atol=1e-9
    )
