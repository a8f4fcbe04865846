# ruff: noqa: F401
"""What commands import. ``tests.tools.warm`` imports this module in the process that it forks."""

import gc

import array_api_compat.torch
import ndonnx
import onnx.reference.ops
import onnxruntime
import pydantic.v1
import redis
import rocksdict
import torch._dynamo
import torch.utils.checkpoint
import uvicorn.lifespan.on
import uvicorn.protocols.http.httptools_impl
import uvloop

import serving.cli.check
import serving.cli.plan
import serving.cli.predict
import serving.cli.serve
import serving.frontend.grpc
import serving.frontend.http.app
import serving.frontend.http.server
import training.command.run

gc.freeze()
