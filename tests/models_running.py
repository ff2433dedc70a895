"""Small networks that gather statistics in buffers, written by hand: batch norms, averages, observers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models import Net, awkward, between, conv
from torch import Tensor, nn


class BatchNorm(nn.Module):
    """Of 8 channels; its averages are written in one of several spellings."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        self.weight, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.register_buffer("running_mean", torch.zeros(8))
        self.register_buffer("running_var", torch.ones(8))
        self.register_buffer("seen", torch.tensor(0))

    def gather(self, mean: Tensor, var: Tensor) -> None:
        """Move the averages a tenth of the way."""
        if self.spelling == "in place":
            self.running_mean.mul_(0.9).add_(0.1 * mean.detach())
            self.running_var.mul_(0.9).add_(0.1 * var.detach())
        elif self.spelling == "assigned":
            self.running_mean = 0.9 * self.running_mean + 0.1 * mean.detach()
            self.running_var = 0.9 * self.running_var + 0.1 * var.detach()
        elif self.spelling == "copied":
            self.running_mean.copy_(self.running_mean.lerp(mean.detach(), 0.1))
            self.running_var.data.lerp_(var.data, 0.1)
        else:
            with torch.no_grad():
                self.seen += 1
                self.running_mean *= 0.9
                self.running_mean += 0.1 * mean
                self.running_var[:] = self.running_var - 0.1 * (self.running_var - var)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, H, W], normalised."""
        if self.training:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
            self.gather(mean, var)
        else:
            mean, var = self.running_mean, self.running_var
        y = (x - mean[:, None, None]) / torch.sqrt(var[:, None, None] + 1e-5)
        return y * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


class BatchRenorm(nn.Module):
    """Batch renormalisation: in `train()`, the averages from before the step correct what the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 1, 1))
        self.register_buffer("running_mean", torch.zeros(8, 1, 1))
        self.register_buffer("running_var", torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, H, W], normalised."""
        if not self.training:
            return self.weight * (x - self.running_mean) / self.running_var
        mean, std = x.mean((0, 2, 3), keepdim=True)[0], x.std((0, 2, 3), keepdim=True)[0] + 1e-3
        r = (std.detach() / self.running_var).clamp(1 / 3, 3)
        d = ((mean.detach() - self.running_mean) / self.running_var).clamp(-5, 5)
        self.running_mean += 0.1 * (mean.detach() - self.running_mean)
        self.running_var += 0.1 * (std.detach() - self.running_var)
        return self.weight * ((x - mean) / std * r + d)


class Centre(nn.Module):
    """Takes an average from the features, before or after it is moved."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.before = before
        self.register_buffer("centre", torch.zeros(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, H, W]."""
        y = x - self.centre
        if self.training:
            with torch.no_grad():
                self.centre.mul_(0.9).add_(x.mean((0, 2, 3), keepdim=True), alpha=0.1)
        return y if self.before else x - self.centre


class Observer(nn.Module):
    """Fake quantisation by the least and the largest value seen, of each channel or of all."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("least", torch.zeros(shape))
        self.register_buffer("most", torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, H, W], rounded straight through."""
        if self.training:
            seen = x.detach()
            dims = (0, 2, 3) if self.least.dim() else (0, 1, 2, 3)
            self.least.copy_(torch.min(self.least, seen.amin(dims)))
            self.most.copy_(torch.max(self.most, seen.amax(dims)))
        scale = ((self.most - self.least).abs() / 255 + 1e-4).reshape(-1, 1, 1)
        return (x / scale + ((x / scale).round() - x / scale).detach()) * scale


class AveragedCodes(nn.Module):
    """Rounds features to the nearest of 16 codes, which are averages of what was rounded to them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(8, 16))
        self.register_buffer("counts", torch.ones(16))
        self.register_buffer("sums", torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, H, W], straight through."""
        z = x.permute(0, 2, 3, 1)
        flat = z.reshape(-1, z.shape[-1])
        squares = flat.pow(2).sum(1, keepdim=True) + self.codes.pow(2).sum(0, keepdim=True)
        nearest = (-(squares - 2 * flat @ self.codes)).max(1)[1]
        rounded = F.embedding(nearest.view(z.shape[:-1]), self.codes.transpose(0, 1))
        if self.training:
            ones = F.one_hot(nearest, 16).type(flat.dtype)
            self.counts.data.mul_(0.9).add_(ones.sum(0), alpha=0.1)
            self.sums.data.mul_(0.9).add_(flat.transpose(0, 1) @ ones, alpha=0.1)
            total = self.counts.sum()
            smooth = (self.counts + 1e-3) / (total + 16e-3) * total
            self.codes.data.copy_(self.sums / smooth.unsqueeze(0))
        return (z + (rounded - z).detach()).permute(0, 3, 1, 2)


class ActNorm(nn.Module):
    """Its first batch says the scale and the shift."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(8, 1, 1)), nn.Parameter(torch.ones(8, 1, 1))
        self.register_buffer("initialised", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, H, W], by the first batch of mean 0 and deviation 1."""
        if self.training and not self.initialised:
            self.shift.data.copy_(-x.mean((0, 2, 3))[:, None, None])
            self.scale.data.copy_(1 / (x.std((0, 2, 3))[:, None, None] + 1e-6))
            self.initialised.fill_(True)
        return self.scale * (x + self.shift)


def through(*layers: nn.Module) -> Net:
    return between(lambda s, h: F.relu(s.mid(h)), mid=nn.Sequential(*layers))


@awkward(1.0)
def batch_norm_by_hand_in_place() -> nn.Module:
    return through(BatchNorm("in place"))


@awkward(1.0)
def batch_norm_by_hand_assigned() -> nn.Module:
    return through(BatchNorm("assigned"))


@awkward(1.0)
def batch_norm_by_hand_copied() -> nn.Module:
    return through(BatchNorm("copied"), conv(8, 8), BatchNorm("in place"))


@awkward(1.0)
def batch_norm_by_hand_without_gradients() -> nn.Module:
    return through(BatchNorm("without gradients"))


@awkward(1.0)
def one_batch_norm_by_hand_called_twice() -> nn.Module:
    def wiring(s: Net, h: Tensor) -> Tensor:
        h = s.mid(h)
        return F.relu(s.mid(s.between(h)))

    return between(wiring, mid=BatchNorm("assigned"), between=conv(8, 8))


@awkward(1.0)
def batch_renorm() -> nn.Module:
    return through(BatchRenorm())


@awkward(1.0)
def features_less_their_average() -> nn.Module:
    return through(Centre(before=True), conv(8, 8), Centre(before=False))


@awkward(1.0)
def observed_ranges_a_channel() -> nn.Module:
    return through(Observer(8))


@awkward(1.0)
def observed_range_of_all_channels() -> nn.Module:
    return through(Observer())


@awkward(1.0)
def codes_averaged_in_buffers() -> nn.Module:
    return through(AveragedCodes())


@awkward(0.0)
def actnorm_that_has_seen_nothing() -> nn.Module:
    return through(ActNorm())


@awkward(1.0)
def actnorm() -> nn.Module:
    model = through(ActNorm())
    model(torch.randn(2, 3, 8, 8))
    return model
