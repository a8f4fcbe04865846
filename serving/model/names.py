"""What models and tables may be called: the names become folders, metrics' labels and parts of database keys."""

import re

# HPS builds a table's tag from the model's name and takes these characters only.
MODEL_NAME = re.compile(r"[A-Za-z0-9_-]{1,120}")
TABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,119}")
