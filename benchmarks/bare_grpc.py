"""The limit of a Python gRPC server: grpc.aio with a service that returns fixed messages.

    python -m benchmarks.bare_grpc MODEL PORT

It asks the server at PORT for its messages about MODEL and repeats them. Its answer to ``ModelInfer`` is that of the
first request. It prints its port, then serves until it is killed.
"""

import asyncio
import sys

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc


class Fixed(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Repeats what another server has answered."""

    def __init__(self, model, stub):
        self._stub = stub
        self._infer = None
        # Without extensions, so the client does not ask for statistics, which would have to advance.
        self.ServerMetadata = self._repeating(service_pb2.ServerMetadataResponse(name="bare"))
        self.ModelMetadata = self._repeating(stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=model)))
        self.ModelConfig = self._repeating(stub.ModelConfig(service_pb2.ModelConfigRequest(name=model)))

    @staticmethod
    def _repeating(answer):
        async def repeat(_request, _context):
            return answer

        return repeat

    async def ModelInfer(self, request, _context):  # noqa: N802  gRPC's name
        if self._infer is None:
            self._infer = self._stub.ModelInfer(request)
        self._infer.id = request.id
        return self._infer

    async def ModelStreamInfer(self, requests, context):  # noqa: N802  gRPC's name
        async for request in requests:
            yield service_pb2.ModelStreamInferResponse(infer_response=await self.ModelInfer(request, context))


async def serve(model, port):
    """Serve on a free port."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        server = grpc.aio.server()
        service = Fixed(model, service_pb2_grpc.GRPCInferenceServiceStub(channel))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
        print(server.add_insecure_port("127.0.0.1:0"), flush=True)
        await server.start()
        await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
