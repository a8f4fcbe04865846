"""SOK's legacy layers, as layers of Keras."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from training.arguments import shown, whole
from training.calls.ids import IdRows
from training.calls.sok import read_layer_combiner, require_slots
from training.tf.engine import Ids, pool
from training.tf.ids import one_each, read_ids
from training.tf.sok.initialize import started
from training.tf.sok.variables import LayerVariable


class _Layer(keras.layers.Layer):  # type: ignore[misc]
    """A layer with a table.

    Attributes:
        embedding_variable: the rows.
    """

    embedding_variable: LayerVariable

    def __init__(
        self,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        use_hashtable: bool,
        key_dtype: Any,
        embedding_initializer: Any,
        **named: Any,
    ) -> None:
        super().__init__(**named)
        call = type(self).__name__
        started(call)
        self.supports_jit = False  # XLA cannot call native code, so fit() must not compile
        self.max_vocabulary_size_per_gpu = whole(call, "max_vocabulary_size_per_gpu", max_vocabulary_size_per_gpu, 1)
        self.embedding_vec_size = whole(call, "embedding_vec_size", embedding_vec_size, 1)
        self.slot_num = whole(call, "slot_num", slot_num, 1)
        self.use_hashtable = bool(use_hashtable)
        if key_dtype is not None and tf.as_dtype(key_dtype) not in (tf.int64, tf.int32):
            raise TypeError(f"{call}: expected the key_dtype tf.int64 or tf.int32, got {key_dtype!r}")
        self.key_dtype = None if key_dtype is None else tf.as_dtype(key_dtype).name
        try:
            self.embedding_initializer = keras.initializers.get(
                keras.initializers.RandomUniform() if embedding_initializer is None else embedding_initializer
            )
        except ValueError as err:
            expected = "embedding_initializer as an initializer of Keras"
            raise TypeError(f"{call}: expected {expected}, got {shown(embedding_initializer)}") from err
        self._place = f"{call} {self.name!r}"

    def build(self, input_shape: Any) -> None:
        """Make the rows."""
        self.embedding_variable = LayerVariable(
            self._place,
            self.max_vocabulary_size_per_gpu,
            self.embedding_vec_size,
            self.embedding_initializer,
            self.use_hashtable,
        )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, for Keras."""
        names = ("max_vocabulary_size_per_gpu", "embedding_vec_size", "slot_num", "use_hashtable", "key_dtype")
        config = {**super().get_config(), **{name: getattr(self, name) for name in names}}
        return {**config, "embedding_initializer": keras.initializers.serialize(self.embedding_initializer)}

    def save_own_variables(self, store: Any) -> None:
        """Save the rows that have a key, and the keys."""
        count = self.embedding_variable.row_count
        store["keys"] = self.embedding_variable.keys
        store["rows"] = np.asarray(self.embedding_variable.value)[:count]

    def load_own_variables(self, store: Any) -> None:
        """Undo ``save_own_variables``.

        Raises:
            ValueError: the file has no rows of this layer, or more rows than the layer has room for.
        """
        if not {"keys", "rows"} <= set(store.keys()):
            raise ValueError(f"{self._place}: expected a file with its keys and rows, got {sorted(store.keys())}")
        keys, rows = np.asarray(store["keys"], np.int64), np.asarray(store["rows"], np.float32)
        variable = self.embedding_variable
        shape = (len(keys), self.embedding_vec_size)
        if rows.shape != shape or len(keys) > self.max_vocabulary_size_per_gpu:
            expected = f"at most {self.max_vocabulary_size_per_gpu:,} rows of {self.embedding_vec_size}"
            raise ValueError(f"{self._place}: expected {expected}, got keys {shown(keys)} and rows {shown(rows)}")
        if self.use_hashtable:
            variable.keys = keys
        variable.set_rows(keys, rows)

    def _look_up(self, ids: Ids, combiner: str, training: bool | None) -> tf.Tensor:
        started(self._place)
        [vectors] = pool([self.embedding_variable], [ids], [combiner], bool(training))
        return tf.cast(vectors, self.compute_dtype)

    def _trackable_children(self, save_type: str = "checkpoint", **named: Any) -> Any:
        """Refuse a SavedModel, whose functions would call the native code of this process."""
        if save_type == "savedmodel":
            advice = "save model.save(...keras), or make a version for the server with hotrow.from_keras"
            raise NotImplementedError(f"{self._place}: a SavedModel cannot hold its rows for another process; {advice}")
        return super()._trackable_children(save_type, **named)


@keras.saving.register_keras_serializable("hotrow")
class All2AllDenseEmbedding(_Layer):
    """A layer that looks up every key, without combining."""

    def __init__(
        self,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        nnz_per_slot: int,
        dynamic_input: bool = False,
        use_hashtable: bool = True,
        key_dtype: Any = None,
        embedding_initializer: Any = None,
        **named: Any,
    ) -> None:
        """Make a layer.

        Args:
            max_vocabulary_size_per_gpu: the most distinct keys.
            embedding_vec_size: D.
            slot_num: S.
            nnz_per_slot: the keys of each slot.
            dynamic_input: inputs have any shape. Their number of keys need not be a multiple of S and ``nnz_per_slot``.
            use_hashtable: keys are any integers. Otherwise they must be below ``max_vocabulary_size_per_gpu``.
            key_dtype: ``tf.int64``, ``tf.int32`` or None. Keys are int64 inside.
            embedding_initializer: an initializer of Keras. None: uniform from -0.05 to 0.05.
            named: of every layer of Keras, such as ``name``.

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
            **named,
        )
        self.nnz_per_slot = whole(type(self).__name__, "nnz_per_slot", nnz_per_slot, 1)
        self.dynamic_input = dynamic_input

    def get_config(self) -> dict[str, Any]:
        """See ``_Layer``."""
        return {**super().get_config(), "nnz_per_slot": self.nnz_per_slot, "dynamic_input": self.dynamic_input}

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """Return [B, S, nnz_per_slot, D], or with ``dynamic_input`` the shape of the inputs and D."""
        of_sample = tuple(input_shape) if self.dynamic_input else (None, self.slot_num, self.nnz_per_slot)
        return (*of_sample, self.embedding_vec_size)

    def call(self, inputs: Any, training: bool | None = None) -> tf.Tensor:
        """Look up keys.

        Args:
            inputs: int64 or int32 keys of B samples, in any shape with B * S * ``nnz_per_slot`` elements.
            training: new keys get rows. Otherwise a new key has a vector of zeros.

        Returns:
            float32[B, S, nnz_per_slot, D]. With ``dynamic_input``, the shape of ``inputs`` and D.

        Raises:
            TypeError: the inputs are no keys.
            ValueError: there is another number of keys, or there are too many distinct keys.
            IndexError: there is no hash table, and a key is out of range.
            ReservedKeyError: a new key is one of the four reserved values.
        """

        def check(rows: IdRows) -> IdRows:
            if len(rows.ids) % (self.slot_num * self.nnz_per_slot) and not self.dynamic_input:
                expected = f"{self.slot_num} slots of {self.nnz_per_slot} keys for each sample"
                raise ValueError(f"{self._place}: expected {expected}, got {len(rows.ids)} keys")
            return rows

        vectors = self._look_up(one_each(self._place, inputs).then(check), "sum", training)
        if self.dynamic_input:
            return tf.reshape(vectors, tf.concat([tf.shape(inputs), [self.embedding_vec_size]], 0))
        return tf.reshape(vectors, (-1, self.slot_num, self.nnz_per_slot, self.embedding_vec_size))


@keras.saving.register_keras_serializable("hotrow")
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
        key_dtype: Any = None,
        embedding_initializer: Any = None,
        **named: Any,
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
            embedding_initializer: of the rows.
            named: of every layer of Keras, such as ``name``.

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
            **named,
        )
        call = type(self).__name__
        self.combiner = read_layer_combiner(call, combiner)
        self.max_nnz = whole(call, "max_nnz", max_nnz, 1)
        most = self.slot_num * self.max_nnz
        self.max_feature_num = most if max_feature_num is None else whole(call, "max_feature_num", max_feature_num, 1)

    def get_config(self) -> dict[str, Any]:
        """See ``_Layer``."""
        of_this = {name: getattr(self, name) for name in ("combiner", "max_nnz", "max_feature_num")}
        return {**super().get_config(), **of_this}

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """Return [B, S, D]."""
        return (None, self.slot_num, self.embedding_vec_size)

    def call(self, inputs: Any, training: bool | None = None) -> tf.Tensor:
        """Look up keys, and combine the vectors of each slot.

        Args:
            inputs: B * S rows of keys, a ``tf.SparseTensor`` or a ``tf.RaggedTensor``. Row r is slot ``r % S`` of
                sample ``r // S``.
            training: see ``All2AllDenseEmbedding.call``.

        Returns:
            float32[B, S, D]. A slot without keys is zero.

        Raises:
            TypeError: the inputs are no rows of keys.
            ValueError: there is another number of rows, a row or a sample has too many keys, or there are too many
                distinct keys.
            IndexError: there is no hash table, and a key is out of range.
            ReservedKeyError: a new key is one of the four reserved values.
        """

        def check(rows: IdRows) -> IdRows:
            require_slots(self._place, rows.row_ptrs, self.slot_num, self.max_nnz, self.max_feature_num)
            return rows

        vectors = self._look_up(read_ids(self._place, inputs).then(check), self.combiner, training)
        return tf.reshape(vectors, (-1, self.slot_num, self.embedding_vec_size))
