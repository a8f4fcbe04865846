"""Layer 0: native code and its loaders. Knows no model, no policy and no server."""
