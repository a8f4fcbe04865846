"""What commands import. ``tests.tools.warm`` imports this module in the process that it forks."""

import gc

import ndonnx  # noqa: F401
import onnxruntime  # noqa: F401
import pydantic.v1  # noqa: F401
import redis  # noqa: F401
import rocksdict  # noqa: F401
import uvicorn.lifespan.on
import uvicorn.protocols.http.httptools_impl  # noqa: F401
import uvloop  # noqa: F401

import serving.cli.check
import serving.cli.plan
import serving.cli.predict
import serving.cli.serve
import serving.frontend.grpc
import serving.frontend.http.app
import serving.frontend.http.server  # noqa: F401
import training.command.run  # noqa: F401

gc.freeze()
