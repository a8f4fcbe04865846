"""The servers that take requests. Only this package uses web frameworks or Triton.

A predict request over HTTP goes through these modules:

- ``http.connection`` gets its bytes, and ``http.request`` gives it to the application.
- ``http.infer`` has the application, ``InferPath``, and the forms of a body. ``http.app`` has all other paths.
- ``http.edge`` checks who may ask, and makes answers of errors.
- ``endpoint`` finds the model, admits the request and counts the answer.
- ``runner`` says whether the request is short enough for the event loop. ``batcher`` merges the others in threads.
- ``exchange`` reads the request, has it answered and writes the answer, with ``serving.repository.served_model``. The
  session of the model predicts in ``serving.session``, ``serving.routes`` and ``serving.lookup.session``, and rows are
  looked up by ``PooledTables`` in ``serving.parameter_server.lookup``.

A request over gRPC comes from ``grpc_entry`` and ``grpc`` to ``endpoint``. A request of Triton comes from
``triton.model`` to ``exchange``.
"""
