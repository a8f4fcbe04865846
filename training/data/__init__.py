"""Files of training data in HugeCTR's formats: read as a stream of samples, and written."""

from training.data.norm import read_norm, write_file_list, write_norm
from training.data.raw import read_raw, write_raw

__all__ = ["read_norm", "read_raw", "write_file_list", "write_norm", "write_raw"]
