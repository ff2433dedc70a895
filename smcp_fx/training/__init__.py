"""The commands' training loop (precision, ranks, checkpoints), and a teacher for any loop."""

from smcp_fx.training.loop import Epoch as Epoch
from smcp_fx.training.loop import TrainingLoop as TrainingLoop
from smcp_fx.training.loop import moved as moved
from smcp_fx.training.teacher import Teacher as Teacher
