"""The example of ``from_keras``: one value for each input of the model, in any form that has the input's shape."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import ConfigError, did_you_mean

_KINDS = {"U": "strings", "S": "strings", "b": "booleans", "i": "integers", "u": "integers", "f": "numbers"}


def read_example(model: Any, example: Any) -> dict[str, NDArray[Any]]:
    """Return the example as an array for each input, in the order of the model's inputs.

    Raises:
        ConfigError: an input has no value, or its value has another type or shape. The message names the input.
    """
    tensors = {str(tensor.name): tensor for tensor in model.inputs}
    is_by_name = isinstance(getattr(model, "input", None), dict)
    values = dict(_by_input(tensors, example, is_by_name))
    arrays = {name: _array(name, tensor, values[name]) for name, tensor in tensors.items()}
    samples = {name: len(array) for name, array in arrays.items()}
    if len(set(samples.values())) > 1:
        came = ", ".join(f"{name!r} {count}" for name, count in samples.items())
        raise _error(f"expected as many samples for each input, got {came}")
    if not min(samples.values()):
        raise _error("expected a sample, got none")
    return arrays


def as_inputs(keras: Any, model: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Return arrays as tensors in the form that the model takes."""
    given = [_tensor(keras, array) for array in arrays.values()]
    return given[0] if isinstance(model, keras.Sequential) else keras.tree.pack_sequence_as(model.input, given)


def _by_input(tensors: Mapping[str, Any], example: Any, is_by_name: bool) -> Iterator[tuple[str, Any]]:
    """Yield each input and its value: by name, in order, or the only one."""
    if isinstance(example, Mapping):
        for name in example:
            if name not in tensors:
                raise _error(f"the model has no input {name!r}{did_you_mean(str(name), tensors)}")
        for name in tensors:
            if name not in example:
                raise _error(f"expected a value for the input {name!r}, got {', '.join(map(repr, example)) or 'none'}")
        yield from example.items()
    elif len(tensors) == 1:
        [name] = tensors
        is_listed = isinstance(example, list | tuple) and len(example) == 1
        yield name, example[0] if is_listed and _rank(example) > len(tensors[name].shape) else example
    elif isinstance(example, list | tuple) and len(example) == len(tensors) and not is_by_name:
        yield from zip(tensors, example, strict=True)
    else:
        form = "dictionary" if is_by_name else "dictionary or a list"
        expected = f"expected a {form} of the inputs {', '.join(map(repr, tensors))}"
        came = f"{len(example)} values" if isinstance(example, list | tuple) else type(example).__name__
        raise _error(f"{expected}, got {came}")


def _rank(value: Any) -> int:
    try:
        return np.ndim(value)
    except ValueError:  # lists of several lengths
        return 0


def _array(name: str, tensor: Any, value: Any) -> NDArray[Any]:
    """Return the value of an input as an array of its type and shape."""
    dtype = np.dtype({"string": "U", "bfloat16": "float32"}.get(str(tensor.dtype), str(tensor.dtype)))
    kind = _KINDS[dtype.kind]
    try:
        array = np.asarray(value)
    except Exception as err:  # of any framework
        raise _error(f"{name!r}: expected {kind} in lists of equal length, got {type(value).__name__}") from err
    if array.dtype == object:  # TensorFlow's strings
        texts = [text.decode() if isinstance(text, bytes) else text for text in array.reshape(-1)]
        array = np.array(texts).reshape(array.shape)
    found = _KINDS.get(array.dtype.kind, f"{type(value).__name__} of {array.dtype}")
    fits = kind == found if "strings" in (kind, found) else array.dtype.kind in "biuf"
    if not fits:
        raise _error(f"{name!r}: expected {kind}, got {found}")
    expected = [*tensor.shape[1:]]
    if array.ndim == len(expected) and expected[-1:] == [1]:
        array = array[..., None]  # Keras adds and removes such an axis too
    elif array.ndim == len(expected) + 2 and array.shape[-1] == 1:
        array = array[..., 0]
    sizes = zip(array.shape[1:], expected, strict=False)
    if array.ndim != len(expected) + 1 or any(wanted not in (None, size) for size, wanted in sizes):
        shape = ", ".join("any" if size is None else str(size) for size in ("B", *expected))
        raise _error(f"{name!r}: expected the shape [{shape}], got {list(np.shape(value))}")
    if kind == "strings":
        return array
    numbers = array.astype(dtype)
    if kind == "integers" and not np.array_equal(numbers, array):
        at = tuple(np.argwhere(numbers != array)[0])
        raise _error(f"{name!r}: expected integers of {tensor.dtype}, got {array[at].item()!r}")
    return numbers


def _tensor(keras: Any, array: NDArray[Any]) -> Any:
    if array.dtype.kind in "US":
        import tensorflow as tf  # lookups of strings need it with any backend

        return tf.constant(array)
    return keras.ops.convert_to_tensor(array)


def said(err: BaseException) -> str:
    """Return the message of an error of Keras in one line, without its colours, its list of arguments and its frames.

    The message is that of the first cause.
    """
    while err.__cause__ is not None:
        err = err.__cause__
    message = re.sub(r"\x1b\[\d*m|\{\{.*?\}\} ?| \[Op:\w+\].*", "", str(err)).removeprefix("in user code:\n")
    message = re.sub(r' *File ".*", line \d+, in .*\n.*\n', "", message)  # TensorFlow's, in a graph
    lines = [line.strip() for line in re.split(r"\n\n *Arguments received by ", message)[0].splitlines()]
    return " ".join(line for line in lines if line and "Exception encountered when" not in line)


def _error(reason: str) -> ConfigError:
    return ConfigError("from_keras", "example", reason)
