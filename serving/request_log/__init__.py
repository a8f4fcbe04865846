"""The request log: a sample of the requests and their answers, as Parquet files.

Each sample of a request is one row. It has the raw features by name, or the keys of each slot and the dense features,
and the columns of ``records``. Each model has a folder, because its rows have columns of their own.

``log`` is what a server writes with, ``files`` are the files, ``records`` are the rows.
"""

from serving.request_log.files import stream_batches
from serving.request_log.log import RequestLog
from serving.request_log.records import key_columns, takes_raw_features

__all__ = ["RequestLog", "key_columns", "stream_batches", "takes_raw_features"]
