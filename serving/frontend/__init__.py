"""The servers that take requests. Only this package uses FastAPI or Triton."""
