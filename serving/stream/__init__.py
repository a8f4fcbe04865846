"""Streams of updates: the messages, and the logs that carry messages from a trainer to servers.

A trainer encodes changed rows as messages, in Hotrow's format (``message``) or in HPS's (``hps_message``). It sends the
messages to an ``UpdateSink``. A server polls an ``UpdateSource``. The log between them has partitions, and each
partition keeps its order. All updates of a key are in one partition: see ``serving.model.hps_hash.key_groups``.
"""

from serving.errors import BadMessageError, PositionLostError, SinkError, SourceUnreachableError
from serving.model.hps_hash import KEY_GROUPS, key_groups
from serving.stream.encoding import Encoded, MessageEncoder, MessageFormat
from serving.stream.hps_message import HPS_MAGIC, decode_hps, encode_hps
from serving.stream.message import (
    MOST_ACCUMULATE_ROWS,
    MOST_MESSAGE_BYTES,
    Kind,
    UpdateMessage,
    WireDtype,
    decode,
    encode,
)
from serving.stream.opening import open_sink, open_source, read_settings
from serving.stream.source import Record, UpdateSink, UpdateSource

__all__ = [
    "HPS_MAGIC",
    "KEY_GROUPS",
    "MOST_ACCUMULATE_ROWS",
    "MOST_MESSAGE_BYTES",
    "BadMessageError",
    "Encoded",
    "Kind",
    "MessageEncoder",
    "MessageFormat",
    "PositionLostError",
    "Record",
    "SinkError",
    "SourceUnreachableError",
    "UpdateMessage",
    "UpdateSink",
    "UpdateSource",
    "WireDtype",
    "decode",
    "decode_hps",
    "encode",
    "encode_hps",
    "key_groups",
    "open_sink",
    "open_source",
    "read_settings",
]
