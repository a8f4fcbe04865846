"""Where requests come in. The only package that knows FastAPI, gRPC or Triton."""
