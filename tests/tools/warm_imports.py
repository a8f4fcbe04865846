"""What commands import. ``tests.tools.warm`` imports this module in the process that it forks."""

import gc

import ndonnx  # noqa: F401
import onnxruntime  # noqa: F401
import uvloop  # noqa: F401

import training.command.run  # noqa: F401

gc.freeze()
