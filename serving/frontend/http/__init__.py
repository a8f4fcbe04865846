"""The HTTP front end: a FastAPI application on uvicorn."""
