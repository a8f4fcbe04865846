"""SOK's legacy layers, as PyTorch modules."""

from typing import Any

import torch

from training.arguments import shown, whole
from training.calls.sok import RANDOM, read_layer_combiner, require_slots
from training.embedding.inputs import FeatureBags
from training.sok.embedding_variable import EmbeddingVariable
from training.sok.lookup import look_up
from training.sparse_tensor import read_ids
from training.tables.config import Combiner, Initializer

_KEY_TYPES = (torch.int64, torch.int32)


class _Layer(torch.nn.Module):  # type: ignore[misc]
    """A layer with a table.

    Attributes:
        embedding_variable: this process's rows.
        slot_num: the number of slots.
    """

    embedding_variable: EmbeddingVariable

    def __init__(
        self,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        use_hashtable: bool,
        key_dtype: torch.dtype | None,
        embedding_initializer: Initializer | None,
        name: str | None,
    ) -> None:
        super().__init__()
        self._call = type(self).__name__
        rows = whole(self._call, "max_vocabulary_size_per_gpu", max_vocabulary_size_per_gpu, 1)
        dim = whole(self._call, "embedding_vec_size", embedding_vec_size, 1)
        self.slot_num = whole(self._call, "slot_num", slot_num, 1)
        if key_dtype not in (None, *_KEY_TYPES):
            raise TypeError(f"{self._call}: expected the key_dtype torch.int64 or torch.int32, got {key_dtype!r}")
        initializer = RANDOM if embedding_initializer is None else embedding_initializer
        if not isinstance(initializer, Initializer):
            expected = "embedding_initializer of training.embedding"
            raise TypeError(f"{self._call}: expected {expected}, got {shown(initializer)}")
        self.embedding_variable = EmbeddingVariable.make(self._call, rows, dim, initializer, use_hashtable, name)
        self.register_load_state_dict_pre_hook(_check_state)

    def get_extra_state(self) -> Any:
        """Return the keys of this process's rows, for ``state_dict``."""
        keys = self.embedding_variable.keys
        return None if keys is None else torch.from_numpy(keys)

    def set_extra_state(self, state: Any) -> None:
        """Undo ``get_extra_state``. ``load_state_dict`` has checked the keys."""
        if state is not None:
            self.embedding_variable.keys = state.cpu().numpy()

    def _look_up(self, bags: FeatureBags, combiner: Combiner, training: bool | None) -> torch.Tensor:
        self.embedding_variable.check(f"{self._call}: inputs", bags)
        trains = torch.is_grad_enabled() and (self.training if training is None else training)
        with torch.set_grad_enabled(trains):
            [vectors] = look_up([self.embedding_variable], [bags], [combiner], trains)
        return vectors


def _check_state(layer: _Layer, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Refuse a state before PyTorch copies its rows and then its keys."""
    rows, keys = state.get(f"{prefix}embedding_variable"), state.get(f"{prefix}_extra_state")
    if rows is None and keys is None:  # PyTorch reports them as missing
        return
    call = f"{layer._call}: load_state_dict"
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(f"{call}: expected assign=False, because a layer keeps its variable")
    layer.embedding_variable.check_state(call, rows, keys)


class All2AllDenseEmbedding(_Layer):
    """A layer that returns the vector of each key, without combining vectors."""

    def __init__(
        self,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        nnz_per_slot: int,
        dynamic_input: bool = False,
        use_hashtable: bool = True,
        key_dtype: torch.dtype | None = None,
        embedding_initializer: Initializer | None = None,
        name: str | None = None,
    ) -> None:
        """Make a layer.

        Args:
            max_vocabulary_size_per_gpu: the most distinct keys of each process.
            embedding_vec_size: D.
            slot_num: S.
            nnz_per_slot: the keys of each slot.
            dynamic_input: inputs have any shape. Their number of keys need not be a multiple of S and ``nnz_per_slot``.
            use_hashtable: keys are any integers. Otherwise they must be below ``max_vocabulary_size_per_gpu`` times the
                number of processes.
            key_dtype: ``torch.int64``, ``torch.int32`` or None. Tables have int64 keys.
            embedding_initializer: an initializer of ``training.embedding``. None: ``Uniform(-0.05, 0.05)``.
            name: a name for messages and files.

        Raises:
            SessionError: ``Init`` was not called.
            TypeError: an argument is of another type.
            ValueError: an argument is out of range.
        """
        super().__init__(
            max_vocabulary_size_per_gpu,
            embedding_vec_size,
            slot_num,
            use_hashtable,
            key_dtype,
            embedding_initializer,
            name,
        )
        self.nnz_per_slot = whole(self._call, "nnz_per_slot", nnz_per_slot, 1)
        self.dynamic_input = dynamic_input

    def forward(self, inputs: torch.Tensor, training: bool | None = None) -> torch.Tensor:
        """Look up keys.

        Args:
            inputs: int64 or int32 keys of B samples, in any shape with B * S * ``nnz_per_slot`` elements.
            training: new keys get rows, and the vectors have a gradient. Otherwise a new key has a vector of zeros.
                None: what ``train`` and ``eval`` have set.

        Returns:
            float32[B, S, nnz_per_slot, D]. With ``dynamic_input``, the shape of ``inputs`` and D.

        Raises:
            TypeError: the inputs are no keys.
            ValueError: there is another number of keys, or there are too many distinct keys.
            IndexError: there is no hash table, and a key is out of range.
            ReservedKeyError: a new key is one of the four reserved values.
        """
        if not isinstance(inputs, torch.Tensor) or inputs.dtype not in _KEY_TYPES or inputs.is_sparse:
            raise TypeError(f"{self._call}: expected inputs as keys of int64 or int32, got {shown(inputs)}")
        of_sample = self.slot_num * self.nnz_per_slot
        if not self.dynamic_input and inputs.numel() % of_sample:
            expected = f"{self.slot_num} slots of {self.nnz_per_slot} keys for each sample"
            raise ValueError(f"{self._call}: expected {expected}, got {shown(inputs)}")
        keys = inputs.detach().to("cpu", torch.int64).reshape(-1).numpy()
        bags = FeatureBags(keys, None, None, 1, keys.shape, inputs.device)
        samples = inputs.numel() // of_sample
        shape = inputs.shape if self.dynamic_input else (samples, self.slot_num, self.nnz_per_slot)
        return self._look_up(bags, "sum", training).reshape(*shape, self.embedding_variable.dimension)


class DistributedEmbedding(_Layer):
    """A layer that combines the vectors of each slot."""

    def __init__(
        self,
        combiner: str,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        max_nnz: int,
        max_feature_num: int | None = None,
        use_hashtable: bool = True,
        key_dtype: torch.dtype | None = None,
        embedding_initializer: Initializer | None = None,
        name: str | None = None,
    ) -> None:
        """Make a layer.

        Args:
            combiner: "sum" or "mean", in upper or lower case.
            max_vocabulary_size_per_gpu: see ``All2AllDenseEmbedding``, also for the arguments that are not below.
            embedding_vec_size: D.
            slot_num: S.
            max_nnz: the most keys of a slot.
            max_feature_num: the most keys of a sample. None: S * ``max_nnz``.
            use_hashtable: keys are any integers.
            key_dtype: of the keys.
            embedding_initializer: of new rows.
            name: a name for messages and files.

        Raises:
            SessionError: ``Init`` was not called.
            TypeError: an argument is of another type.
            ValueError: an argument is out of range.
        """
        super().__init__(
            max_vocabulary_size_per_gpu,
            embedding_vec_size,
            slot_num,
            use_hashtable,
            key_dtype,
            embedding_initializer,
            name,
        )
        self.combiner: Combiner = read_layer_combiner(self._call, combiner)
        self.max_nnz = whole(self._call, "max_nnz", max_nnz, 1)
        most = self.slot_num * self.max_nnz
        self.max_feature_num = (
            most if max_feature_num is None else whole(self._call, "max_feature_num", max_feature_num, 1)
        )

    def forward(self, inputs: Any, training: bool | None = None) -> torch.Tensor:
        """Look up keys, and combine the vectors of each slot.

        Args:
            inputs: B * S rows of keys, in the forms of ``lookup_sparse``. Row r is slot ``r % S`` of sample ``r // S``.
            training: see ``All2AllDenseEmbedding.forward``.

        Returns:
            float32[B, S, D]. A slot without keys is zero.

        Raises:
            TypeError: the inputs are no rows of keys.
            ValueError: there is another number of rows, a row or a sample has too many keys, or there are too many
                distinct keys.
            IndexError: there is no hash table, and a key is out of range.
            ReservedKeyError: a new key is one of the four reserved values.
        """
        place = f"{self._call}: inputs"
        bags = read_ids(place, inputs).bags(default_id=None)
        assert bags.row_ptrs is not None
        require_slots(place, bags.row_ptrs, self.slot_num, self.max_nnz, self.max_feature_num)
        vectors = self._look_up(bags, self.combiner, training)
        return vectors.reshape(-1, self.slot_num, self.embedding_variable.dimension)
