"""Open what a user passes to ``--table`` or ``--checkpoint``."""

from collections.abc import Sequence
from pathlib import Path

from serving.errors import ModelFileError
from serving.sources.checkpoint import Checkpoint, find_table, missing, without_hidden
from serving.sources.dynamicemb import DynamicEmbDump
from serving.sources.numpy_files import open_folder, open_npy, open_npz, open_pair
from serving.sources.rows import BareRows, TableRows
from serving.sources.safetensors_file import SafetensorsFile
from serving.sources.safetensors_folder import SafetensorsFolder
from serving.sources.sok import SokDump
from serving.sources.tensorflow_checkpoint import TensorFlowCheckpoint, checkpoint_at
from serving.sources.tfra import TfraTables
from serving.sources.torch_file import TorchFile
from serving.sources.torcheasyrec import TorchEasyRecDelta

_KERAS = (".keras", ".h5")
_CONVERTED = (
    "a folder of torch.distributed.checkpoint, whose index is a pickle that can run code; convert it to one file: "
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt"
)


class TableFolders:
    """A folder of tables in HugeCTR's directory format, each in a folder of its name. See ``Checkpoint``."""

    def __init__(self, path: Path) -> None:
        """List the tables. There may be none."""
        self.path = path
        self._tables = [file.parent.name for file in without_hidden(path, path.glob("*/emb_vector"))]

    def names(self) -> Sequence[str]:
        """See ``Checkpoint.names``."""
        return self._tables

    def tables(self) -> Sequence[str]:
        """See ``Checkpoint.tables``. Every name is a table."""
        return self._tables

    def rows(self, name: str) -> TableRows:
        """See ``Checkpoint.rows``."""
        return open_folder(self.path / name)


def open_checkpoint(path: Path, others: Sequence[str] = ()) -> Checkpoint:
    """Open a file or folder that holds tables by name.

    Args:
        path: the file or folder.
        others: suffixes of files that the caller reads itself, for a message.

    Raises:
        ModelFileError: it does not exist, or its form is unknown.
        MissingExtraError: it needs PyTorch, which is not installed.
    """
    prefix = checkpoint_at(path)
    if prefix is not None:
        return TensorFlowCheckpoint(path, prefix)
    if not path.exists():
        raise ModelFileError(path, "no such file or folder")
    if not path.is_dir():
        if path.suffix == ".safetensors":
            return SafetensorsFile(path)
        if path.suffix in (".pt", ".pth"):
            return TorchFile(path)
        if path.suffix == ".parquet":
            return TorchEasyRecDelta(path)
        expected = ", ".join([*others, ".safetensors", ".parquet", ".pt"])
        advice = "; for a Keras model, call from_keras" if path.suffix in _KERAS else ""
        raise ModelFileError(path, f"expected {expected} or .pth, found {path.suffix or 'no suffix'!r}{advice}")
    if (path / ".metadata").exists():
        raise ModelFileError(path, _CONVERTED)
    for kind in (DynamicEmbDump, SokDump, TfraTables, TableFolders, SafetensorsFolder, TorchEasyRecDelta):
        checkpoint: Checkpoint = kind(path)
        if checkpoint.tables():
            return checkpoint
    expected = (
        "files such as <table>_emb_keys.rank_0.world_size_1 (DynamicEmb), <table>-key and <table>-weight "
        "(SparseOperationKit), <table>_mht_1of1-keys (TFRA), *.safetensors (RecIS), *.parquet (TorchEasyRec), "
        "variables or checkpoint (TensorFlow), or <table>/key and <table>/emb_vector"
    )
    raise ModelFileError(path, f"no tables found: expected {expected}")


def open_table(table: str, source: str | Path, others: Sequence[str] = ()) -> TableRows | BareRows:
    """Open the rows of one table.

    Args:
        table: its name, which is looked up if ``source`` is a checkpoint and names no tensor.
        source: ``FILE.npy``, ``FILE.npz``, ``KEYS,VECTORS``, a folder of ``key`` and ``emb_vector``, ``CHECKPOINT`` or
            ``CHECKPOINT#NAME``. A path that exists is taken as it is, even if it contains ``,`` or ``#``.
        others: suffixes of files that the caller reads itself, for a message.

    Raises:
        ModelFileError: it cannot be read, or is not a table.
        MissingExtraError: it needs PyTorch, which is not installed.
    """
    path, text = Path(source), str(source)
    if not path.exists() and text.count(",") == 1:
        keys, vectors = text.split(",")
        if not (keys and vectors):
            empty = "vectors after" if keys else "keys before"
            raise ModelFileError(
                f"table {table!r}", f"expected KEYS,VECTORS, got {text!r}: no file of {empty} the comma"
            )
        return open_pair(Path(keys), Path(vectors))
    name = None
    if not path.exists() and "#" in text:
        file, _, name = text.partition("#")
        path = Path(file)
    if name is None and path.suffix == ".npy":
        return open_npy(path)
    if name is None and path.suffix == ".npz":
        return open_npz(path)
    if name is None and (path / "emb_vector").exists():
        return open_folder(path)
    checkpoint = open_checkpoint(path, (*others, ".npy", ".npz") if name is None else ())
    found = find_table(checkpoint, table) if name is None else name if name in checkpoint.names() else None
    if found is None:
        raise missing(checkpoint, table if name is None else name)
    return checkpoint.rows(found)
