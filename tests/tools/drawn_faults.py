"""Draws faults for `make mutants`: small edits at random places of the kernels and of the code that launches them.

Hand-picked faults show what their author thought of. These edits come from a table of operators alone::

    comparison    a < b becomes a <= b, a == b becomes a != b, and the reverse
    bound         "+ 1" or "- 1" is left out
    condition     a && b becomes a || b, and the reverse
    barrier       a barrier or a fence is left out
    atomic        an atomic operation becomes a load, a computation and a store
    launch        two adjacent statements of gpu_cache that use a stream change places
"""

import ast
import random
import re
from itertools import pairwise
from pathlib import Path

OPPOSITE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&"}
# Operator, the text that it edits, and what the text becomes.
KERNEL_OPERATORS = [
    ("comparison", re.compile(r"(?<= )(?:[<>]=?|[!=]=)(?= )"), lambda found: OPPOSITE[found[0]]),
    ("bound", re.compile(r" [+-] 1u?\b(?! *<)"), lambda _: ""),
    ("condition", re.compile(r"(?<= )(?:&&|\|\|)(?= )"), lambda found: OPPOSITE[found[0]]),
    ("barrier", re.compile(r"(?:__sync\w+|__threadfence\w*|fence\w*|meet)\([^;{}]*\);"), lambda _: ";"),
    ("atomic", re.compile(r"\batomic(?=(?:Add|And|CAS|Exch|Min|Max|Or)\()"), lambda _: "plain"),
]
# Types, comments and what the compiler checks are not code that tests could execute.
NOT_CODE = re.compile(r"//[^\n]*|^\s*(?:#|static_assert|template)[^\n]*|\"[^\"\n]*\"", re.MULTILINE)
PLAIN_ATOMICS = """
#define HOTROW_PLAIN(name, result)                       \\
  template <class T, class V>                            \\
  __device__ __forceinline__ T plain##name(T* p, V v) {  \\
    const T old = *static_cast<volatile T*>(p);          \\
    *static_cast<volatile T*>(p) = result;               \\
    return old;                                          \\
  }
HOTROW_PLAIN(Add, static_cast<T>(old + v))
HOTROW_PLAIN(And, static_cast<T>(old & v))
HOTROW_PLAIN(Exch, static_cast<T>(v))
HOTROW_PLAIN(Min, (old < static_cast<T>(v) ? old : static_cast<T>(v)))
HOTROW_PLAIN(Max, (old > static_cast<T>(v) ? old : static_cast<T>(v)))
HOTROW_PLAIN(Or, static_cast<T>(old | v))
template <class T, class V, class W>
__device__ __forceinline__ T plainCAS(T* p, V expected, W v) {
  const T old = *static_cast<volatile T*>(p);
  if (old == static_cast<T>(expected)) *static_cast<volatile T*>(p) = static_cast<T>(v);
  return old;
}
"""


def kernel_edits(text):
    """Yield the operator, the place, the old text and the new text of each edit of a kernel's source."""
    code = NOT_CODE.sub(lambda found: " " * len(found[0]), text)
    for operator, pattern, edited in KERNEL_OPERATORS:
        for found in pattern.finditer(code):
            yield operator, found.start(), found[0], edited(found)


def launch_edits(text):
    """Yield the same for each pair of adjacent statements that use a stream."""
    lines = text.splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line))
    for block in ast.walk(ast.parse(text)):
        body = getattr(block, "body", ())
        for first, second in pairwise(body if isinstance(body, list) else ()):
            if uses_stream(first) and uses_stream(second):
                begin, middle, end = begins[first.lineno - 1], begins[second.lineno - 1], begins[second.end_lineno]
                old = text[begin:end]
                yield "launch", begin, old, old[middle - begin :] + old[: middle - begin]


def uses_stream(statement):
    """Whether a statement queues work, or makes a stream wait."""
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return isinstance(statement, (ast.Expr, ast.For)) and not is_docstring and "stream" in ast.unparse(statement)


def draw(directory, count, seed):
    """Draw edits, the same number of each operator where there are enough.

    Args:
        directory: the project's root.
        count: number of edits.
        seed: of the draw.

    Returns:
        tuples of the file's path in the project, the operator, the place, the old text and the new text.
    """
    by_operator = {}
    for pattern, edits in (("kernels/cuda/*.cu*", kernel_edits), ("gpu_cache/*.py", launch_edits)):
        for path in sorted(Path(directory).glob(pattern)):
            for edit in edits(path.read_text(encoding="utf-8")):
                by_operator.setdefault(edit[0], []).append((path.relative_to(directory), *edit))
    lots = random.Random(seed)
    for edits in by_operator.values():
        lots.shuffle(edits)
    drawn = []
    while len(drawn) < count and any(by_operator.values()):
        drawn += [edits.pop() for edits in by_operator.values() if edits]
    return drawn[:count]
