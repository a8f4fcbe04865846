"""What is learned of a label."""

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from training.data.columns import has_csv
from training.data.csv_faults import NULL, with_line
from training.errors import DataError
from training.model.losses import NO_LABEL, LogLoss, Loss, SquaredError
from training.proposal.columns import FEW_INTEGERS, is_text, typed
from training.proposal.document import Proposal

#: A label is a number if at least this many of its values are neither 0 nor 1. Fewer may be mistakes.
_OTHER_LABELS = 0.1


def proposed_label(pa: Any, path: Path, label: str, values: Any, learned: int, given: Loss | None) -> Proposal:
    """Return what is learned of a label. Refuse wrong labels before features are written.

    Reading the samples checks each label.

    Args:
        pa: pyarrow.
        path: the data.
        label: the column.
        values: those of all rows, of which the first ``learned`` are trained on.
        learned: how many.
        given: the loss; None: the labels decide.
    """
    compute, loss = pa.compute, given or LogLoss()
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)

    def refuse(reason: str, row: int | None = None) -> NoReturn:
        err = DataError(path, reason, column=label, record=None if path.is_dir() else row)
        raise err if err.record is None or not has_csv(path) else with_line(pa, err)

    if is_text(pa.types, values.type):
        texts, values = values, typed(pa, compute.utf8_trim_whitespace(values))
        if is_text(pa.types, values.type):
            known = sorted(map(repr, texts.unique().to_pylist()[:3]), reverse=True)  # 'yes' before 'no'
            expected = f"{loss.expected}, true or false" if loss.kind == "probability" else loss.expected
            advice = f"; turn the label into 0 and 1, such as {label} == {known[0]}"
            refuse(f"expected {expected}, found the texts {', '.join(known)}{advice}")
    kind = str(values.type)
    try:
        numbers = values.cast(pa.float64(), safe=False).to_numpy()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        refuse(f"expected numbers, found {kind}")
    present = numbers[:learned][~np.isnan(numbers[:learned])]
    distinct = len(np.unique(present))
    if given is None and distinct > 2 and loss.is_wrong(present).mean() >= _OTHER_LABELS:
        loss = SquaredError()
    if values.null_count:
        row = compute.index(values.is_null(), value=True).as_py()
        refuse(f"expected {loss.expected}, found {NULL}; {NO_LABEL}", row)
    wrong = loss.is_wrong(numbers)
    if wrong.any():
        row = int(np.argmax(wrong))
        refuse(loss.fault(numbers[row]), row)
    return Proposal(label, kind, distinct, 0.0, None, f"label: {_meaning(loss, numbers[:learned])}", loss.option)


def _meaning(loss: Loss, numbers: NDArray[np.float64]) -> str:
    """Say what is learned of labels, and of few whole numbers, which may be classes, how a class is learned."""
    if not isinstance(loss, SquaredError):
        return loss.meaning
    lowest, highest = numbers.min(), numbers.max()
    is_whole = bool((numbers == np.floor(numbers)).all())
    shown = " to ".join(f"{number:,.10g}" if is_whole else f"{number:,g}" for number in (lowest, highest))
    may_be_classes = is_whole and highest - lowest < FEW_INTEGERS
    advice = "; for the probability of a class, turn the label into 0 and 1" * bool(may_be_classes)
    return f"{loss.meaning} of numbers from {shown}{advice}"
