"""Matching messages about layers."""

import re


def pattern_of(message):
    """A pattern for ``message`` in which every layer's place may be followed by the layer's name."""
    return re.sub(r"(layers\\\[\d+\\\])", r'\1( "[^"]*")?', re.escape(message))
