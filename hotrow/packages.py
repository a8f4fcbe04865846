"""Checks that Hotrow's packages are Hotrow's, before any of them is imported."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("kernels", "gpu_cache", "serving", "training")
_FOLDER = Path(__file__).parents[1]  # where Hotrow is installed


def check_packages() -> None:
    """Check that no package of another project hides one of Hotrow's, and that the C++ extension is built.

    Raises:
        ImportError: its text says what to do.
    """
    for name in _PACKAGES:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise ImportError(f"Hotrow's package '{name}' is not installed: pip install --force-reinstall hotrow")
        if Path(spec.origin).parent != _FOLDER / name:
            raise ImportError(
                f"{spec.origin} belongs to another project and hides Hotrow's package '{name}': "
                "rename it, or give Hotrow an environment of its own"
            )
    import_module("kernels")  # raises if the extension is not built
