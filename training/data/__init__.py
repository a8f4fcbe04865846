"""Files of training data: read as a stream of samples, and written."""

from training.data.checks import ColumnMap
from training.data.columns import read_csv, read_hugectr_parquet, read_parquet
from training.data.convert import write_data_set
from training.data.file_list import write_file_list
from training.data.keyset import read_keyset, write_keyset
from training.data.norm import read_norm, write_norm
from training.data.raw import read_raw, write_raw

__all__ = [
    "ColumnMap",
    "read_csv",
    "read_hugectr_parquet",
    "read_keyset",
    "read_norm",
    "read_parquet",
    "read_raw",
    "write_data_set",
    "write_file_list",
    "write_keyset",
    "write_norm",
    "write_raw",
]
