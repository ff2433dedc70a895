"""The one training loop of the commands: mixed precision, several ranks, a checkpoint an epoch."""

from smcp_fx.training.loop import Epoch as Epoch
from smcp_fx.training.loop import TrainingLoop as TrainingLoop
from smcp_fx.training.loop import moved as moved
