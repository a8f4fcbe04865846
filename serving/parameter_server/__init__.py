"""The truth about embeddings: an ordered list of stores, asked one after the other until every key is answered."""

from serving.parameter_server.counters import TableCounters, TierCounters
from serving.parameter_server.first_rows import FirstRows
from serving.parameter_server.server import ParameterServer
from serving.parameter_server.tier import TierSettings

__all__ = ["FirstRows", "ParameterServer", "TableCounters", "TierCounters", "TierSettings"]
