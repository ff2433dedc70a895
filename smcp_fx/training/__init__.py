"""The one training loop of the commands (precision, ranks, checkpoints), and the teacher of any loop."""

from smcp_fx.training.loop import Epoch as Epoch
from smcp_fx.training.loop import TrainingLoop as TrainingLoop
from smcp_fx.training.loop import moved as moved
from smcp_fx.training.teacher import Teacher as Teacher
