"""How the models of a repository are chosen while it is served: Triton's ``--model-control-mode``."""

from typing import Literal, get_args

ControlMode = Literal["none", "poll", "explicit"]
CONTROL_MODES: tuple[str, ...] = get_args(ControlMode)
#: At the start in the mode ``"explicit"``, this name stands for every model.
EVERY_MODEL = "*"
