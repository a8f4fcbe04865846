"""Layer 2: from a request to probabilities. Importing it needs NumPy, pydantic and array-api-compat only."""
