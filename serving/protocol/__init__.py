"""The KServe v2 inference protocol: its types and codecs, free of any web framework."""
