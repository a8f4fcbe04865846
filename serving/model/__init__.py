"""Models on disk: the layer graph, and every file format that is read and written."""
