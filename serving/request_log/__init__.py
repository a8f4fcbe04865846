"""The request log: a sample of the requests and their answers, as Parquet files.

Each sample of a request is one row. It has the raw features by name, or the keys of each slot and the dense features,
and the columns of ``records``. Each model has a folder, because its rows have their own columns.

A server writes with ``log``. ``files`` has the files, ``records`` makes the rows to write, and ``rows`` reads them
back for a model.
"""

from serving.request_log.files import stream_batches
from serving.request_log.log import RequestLog
from serving.request_log.records import folders_of, has_keys_of
from serving.request_log.rows import (
    RawRows,
    Rows,
    counting_from,
    labeled_columns,
    named,
    parts_of,
    requests_of,
    rows_of,
)

__all__ = [
    "RawRows",
    "RequestLog",
    "Rows",
    "counting_from",
    "folders_of",
    "has_keys_of",
    "labeled_columns",
    "named",
    "parts_of",
    "requests_of",
    "rows_of",
    "stream_batches",
]
