"""The truth about embeddings: an ordered list of stores, asked one after the other until every key is answered."""

from serving.parameter_server.counters import TableCounters
from serving.parameter_server.server import ParameterServer

__all__ = ["ParameterServer", "TableCounters"]
