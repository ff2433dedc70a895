"""Small networks with Fourier transforms, complex numbers, and norms of computed weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import awkward, between, conv, free_parameter
from torch import Tensor, nn


@awkward(1.0)
def fourier_unit() -> nn.Module:
    """Real and imaginary parts beside each other (FFC), or one after the other."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        images, (height, width) = h.shape[0], h.shape[2:]
        spectrum = torch.fft.rfftn(h, dim=(-2, -1), norm="ortho")
        beside = torch.stack((spectrum.real, spectrum.imag), -1).permute(0, 1, 4, 2, 3).contiguous()
        mixed = s.mid(beside.view(images, -1, height, width // 2 + 1)).view(
            images, -1, 2, height, width // 2 + 1
        )
        mixed = mixed.permute(0, 1, 3, 4, 2).contiguous()
        h = torch.fft.irfftn(
            torch.complex(mixed[..., 0], mixed[..., 1]), s=(height, width), dim=(-2, -1), norm="ortho"
        )
        pair = torch.view_as_real(torch.fft.fft2(h)).flatten(-2)
        return h + torch.fft.ifft2(torch.view_as_complex(pair.unflatten(-1, (-1, 2)))).real

    return between(wiring, mid=conv(16, 16, 1))


@awkward(1.0)
def filter_of_the_spectrum() -> nn.Module:
    """A complex filter a channel; the size and the angle of the others."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        filtered = torch.fft.rfft2(h.permute(0, 2, 3, 1), dim=(1, 2)) * torch.view_as_complex(s.filter)
        h = torch.fft.irfft2(filtered, s=(8, 8), dim=(1, 2)).permute(0, 3, 1, 2)
        spectrum = torch.fft.rfft2(h)
        return torch.fft.irfft2(torch.polar(s.mid(spectrum.abs()).abs(), spectrum.angle()), s=(8, 8))

    return between(wiring, filter=free_parameter(8, 5, 8, 2), mid=conv(8, 8, 1))


@awkward(0.0)
def spectrum_of_channels() -> nn.Module:
    return between(lambda s, h: torch.fft.fft(h, dim=1).real)


@awkward(1.0)
def batch_norm_of_computed_weights() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        gain, shift = s.affine(h.new_ones(1, 3)).squeeze(0).chunk(2)
        h = F.batch_norm(h, s.norm.running_mean, s.norm.running_var, s.gain.exp(), s.gain * 0.1)
        return h * gain[:, None, None] + shift[:, None, None]

    norm = nn.BatchNorm2d(8, affine=False)
    return between(wiring, gain=free_parameter(8), affine=nn.Linear(3, 16), norm=norm)


@awkward(1.0)
def mean_behind_a_pixel_shuffle() -> nn.Module:
    """Channels of the shuffled image are mixed; the four positions in it go together."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        large = F.pixel_shuffle(h, 2)
        large = large - large.mean(1, keepdim=True)
        return s.mid(F.layer_norm(large.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2))

    return between(wiring, 16, 8, mid=conv(4, 8))
