"""Layer 0: native code and its loaders. Knows no model, no policy and no server."""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("kernels._host") is None:
    raise ImportError(
        f"{Path(__file__).parents[1]} has Hotrow's sources but no C++ extension for Python "
        f"{sys.version_info.major}.{sys.version_info.minor}: run `pip install -e .` there, "
        "or run Python in another folder"
    )
