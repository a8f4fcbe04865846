"""Splits requests of single keys that have more keys than a workspace has room for."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from serving.lookup.session import LookupResult
from serving.storage.store import Keys


def parts_of(keys: Sequence[Keys], most_keys: int) -> Iterator[list[Keys]]:
    """Cut a request, int64[N] per table, into parts of at most ``most_keys`` over all tables; at least one part."""
    ends = list(accumulate((of_table.size for of_table in keys), initial=0))
    for begin in range(0, max(ends[-1], 1), most_keys):
        cuts = zip(keys, ends, strict=False)
        yield [of_table[max(begin - first, 0) : max(begin + most_keys - first, 0)] for of_table, first in cuts]


def joined(answers: Sequence[LookupResult]) -> LookupResult:
    """Join the answers to the parts of a request."""
    if len(answers) == 1:
        return answers[0]
    embeddings = [np.concatenate(of_table) for of_table in zip(*(answer.embeddings for answer in answers), strict=True)]
    return LookupResult(tuple(embeddings), sum(answer.defaulted_keys for answer in answers))
