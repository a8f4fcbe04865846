"""Pictures that matplotlib draws."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving.errors import MissingExtraError, OutputError
from serving.model.atomic import atomic_write

PICTURES = (".svg", ".png", ".pdf")


@contextmanager
def picture(file: Path, inches: tuple[float, float]) -> Iterator[Any]:
    """Yield a matplotlib figure to draw into, and write it after the block. The file's suffix selects the format.

    Args:
        file: the picture; an existing file is replaced.
        inches: width and height.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OutputError: the file cannot be written.
    """
    check_picture(file)
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    yield figure
    try:
        with atomic_write(file) as written:
            figure.savefig(written, format=file.suffix[1:])
    except OSError as err:
        raise OutputError(f"{file}: cannot be written: {err.strerror or err}") from err


def check_picture(file: Path) -> None:
    """Check that a picture can be drawn into a file, before work that takes long.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OutputError: the file's suffix is not that of a picture.
    """
    if file.suffix.lower() not in PICTURES:
        raise OutputError(f"--plot: expected a file that ends in {', '.join(PICTURES)}, got {file}")
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as err:
        raise MissingExtraError("matplotlib", "plot", "--plot") from err
