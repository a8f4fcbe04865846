"""Models as they lie on disk: the layer graph, and every file format read and written."""
