// Docstrings of kernels._host. Letters: N keys, R bags of keys, D the table's embedding_vec_size, V rows of an index.
#pragma once

namespace hotrow::docs {

constexpr const char* kTable = R"(The native part of kernels.host.HostTable.)";

constexpr const char* kMemoryBytes = R"(Return what a table takes from the system: index, rows, spare rows and stamps.

Args:
    dim: embedding_vec_size, 1 to 65,536.
    capacity_rows: most keys held at a time, 1 to 3,500,000,000.
    row_dtype: the form in which rows are kept, see ``HostTable``.
    overflow_policy: what it does when it is full, see ``HostTable``.

Raises:
    ValueError: a number is out of its range, or ``row_dtype`` or ``overflow_policy`` is unknown.
)";

constexpr const char* kFetch = R"(Read rows into ``out``.

Args:
    keys: int64[N], C-contiguous; duplicates are allowed, N may be 0.
    out: float32[N, D], C-contiguous and writable; every row is written, those of absent keys with zeros.

Returns:
    found: bool[N].

Raises:
    ReservedKeyError: a key is reserved; ``out`` is untouched.
    TypeError: an argument is no array, or one of another dtype.
    ValueError: an argument has another shape, is not contiguous, or ``out`` is read-only or not aligned.
)";

constexpr const char* kFetchPooled = R"(Read bags of rows and combine each bag into one row of ``out``.

Rows are added in key order, in float32, one after the other, from zero: the same bits, NaN payloads aside, as
``pool_rows`` of the rows gathered in that order. An absent key counts as a row of zeros. Weighted rows are first
multiplied by their weight, in float32.

Args:
    keys: int64[N], C-contiguous, bag after bag.
    row_ptrs: int32[R + 1] or int64[R + 1]; bag r is ``keys[row_ptrs[r]:row_ptrs[r + 1]]``.
    out: float32[R, D], C-contiguous and writable; an empty bag becomes zeros.
    combiner: ``"sum"``; ``"mean"``: the sum divided by the number of keys in the bag; ``"sqrtn"``: the sum divided by
        the square root of that number.
    weights: float32[N], one per key, or None. The sum becomes the weighted sum, the mean the weighted sum divided by
        the sum of the weights, sqrtn the weighted sum divided by the square root of the sum of their squares (added in
        key order), as in TensorFlow's ``tf.nn.embedding_lookup_sparse``; where what it is divided by is 0, the bag
        becomes zeros.

Returns:
    found: bool[N], per key.

Raises:
    ReservedKeyError: a key is reserved; ``out`` is untouched.
    TypeError: an argument is no array, or one of another dtype.
    ValueError: an argument has another shape, is not contiguous, ``out`` is read-only or not aligned, the combiner
        is unknown, or ``row_ptrs`` does not begin with 0, falls, or does not end with N.
)";

constexpr const char* kInsert = R"(Insert rows, or overwrite those of keys that are present.

With an ``overflow_policy``, a call that adds more keys than there is room for first evicts others, none of its own.

Args:
    keys: int64[N], C-contiguous; of equal keys the last one wins.
    rows: float32[N, D], C-contiguous; any values that the table's ``row_dtype`` can hold.

Returns:
    The number of keys evicted to make room.

Raises:
    RowValueError: a value is none that ``row_dtype`` can hold; nothing was written.
    TableFullError: the call adds more keys than there is room for, or, with a policy, has more than the table can
        hold; nothing was written.
    ReservedKeyError: a key is reserved; nothing was written.
    TypeError: an argument is no array, or one of another dtype.
    ValueError: an argument has another shape or is not contiguous, or ``rows`` is not aligned.
)";

constexpr const char* kEvict = R"(Remove keys; absent ones are passed over.

Args:
    keys: int64[N], C-contiguous.

Returns:
    The number of keys removed.

Raises:
    ReservedKeyError: a key is reserved; nothing was removed.
    TypeError: ``keys`` is no array, or one of another dtype.
    ValueError: ``keys`` has another shape or is not contiguous.
)";

constexpr const char* kKeyIndex = R"(The native part of kernels.host.KeyIndex.)";

constexpr const char* kFind = R"(Return row numbers int64[N] of ``keys`` int64[N], -1 where absent.

Raises:
    ReservedKeyError: a key is reserved.
    TypeError: ``keys`` is no array, or one of another dtype.
    ValueError: ``keys`` has another shape or is not contiguous.
)";

constexpr const char* kFindOrInsert =
    R"(Return row numbers int64[N] of ``keys`` int64[N]; absent ones get the next numbers.

Raises:
    ReservedKeyError: a key is reserved; nothing was added.
    TypeError: ``keys`` is no array, or one of another dtype.
    ValueError: ``keys`` has another shape or is not contiguous.
    MemoryError: the system does not give the memory to grow; keys added until then stay.
)";

constexpr const char* kKeys = R"(Return the keys int64[V] in the order of their row numbers.)";

constexpr const char* kPoolRows = R"(Combine bags of consecutive rows, with the same bits as ``HostTable.fetch_pooled``.

Args:
    rows: float32[N, D], C-contiguous, bag after bag; D at most 65,536.
    row_ptrs: int32[R + 1] or int64[R + 1]; bag r is ``rows[row_ptrs[r]:row_ptrs[r + 1]]``.
    out: float32[R, D], C-contiguous and writable; must not overlap ``rows``; an empty bag becomes zeros.
    combiner: ``"sum"``; ``"mean"``: the sum divided by the number of rows in the bag; ``"sqrtn"``: the sum divided by
        the square root of that number.
    weights: float32[N], one per row, or None. The sum becomes the weighted sum, the mean the weighted sum divided by
        the sum of the weights, sqrtn the weighted sum divided by the square root of the sum of their squares (added in
        row order), as in TensorFlow's ``tf.nn.embedding_lookup_sparse``; where what it is divided by is 0, the bag
        becomes zeros.

Raises:
    TypeError: an argument is no array, or one of another dtype.
    ValueError: an argument has another shape, is not contiguous, ``out`` is read-only or not aligned, the combiner
        is unknown, or ``row_ptrs`` does not begin with 0, falls, or does not end with N.
)";

constexpr const char* kRowBytes = R"(Return how many bytes an encoded row takes: see ``HostTable`` for the forms.

Args:
    dim: D, 1 to 65,536.
    row_dtype: see ``HostTable``.

Raises:
    ValueError: ``dim`` is out of its range, or ``row_dtype`` is unknown.
)";

constexpr const char* kEncodeRows = R"(Bring rows into the form in which a table of ``row_dtype`` keeps them.

Little-endian, without padding: fp32, fp16 and bf16 are the values; int8 is the float32 scale, then int8[D]; uint8 the
float32 scale, the float32 offset, then uint8[D].

Args:
    rows: float32[N, D], C-contiguous; D at most 65,536.
    row_dtype: see ``HostTable``.

Returns:
    uint8[N, row_bytes(D, row_dtype)].

Raises:
    RowValueError: a value is none that ``row_dtype`` can hold.
    TypeError: ``rows`` is no array, or one of another dtype.
    ValueError: ``rows`` has another shape or is not contiguous, or ``row_dtype`` is unknown.
)";

constexpr const char* kDecodeRows = R"(Read encoded rows, with the bits of ``round_rows`` of the rows they were made of.

Args:
    encoded: uint8[N, row_bytes(D, row_dtype)], C-contiguous, as ``encode_rows`` gives them.
    row_dtype: see ``HostTable``.
    out: float32[N, D], C-contiguous and writable; must not overlap ``encoded``.

Raises:
    TypeError: an argument is no array, or one of another dtype.
    ValueError: an argument has another shape, is not contiguous, ``out`` is read-only or not aligned, or ``row_dtype``
        is unknown.
)";

constexpr const char* kRoundRows = R"(Round rows to what a table of ``row_dtype`` would give back for them, bit for bit.

Args:
    rows: float32[N, D], C-contiguous; D at most 65,536.
    row_dtype: see ``HostTable``.
    out: float32[N, D], C-contiguous and writable; may be ``rows`` itself, but must not overlap it otherwise.

Raises:
    RowValueError: a value is none that ``row_dtype`` can hold; rows before it may have been written.
    TypeError: an argument is no array, or one of another dtype.
    ValueError: an argument has another shape, is not contiguous, ``out`` is read-only or not aligned, or ``row_dtype``
        is unknown.
)";

constexpr const char* kFirstOutside = R"(Return the position of the first key below ``smallest`` or above ``largest``; N where there is none.

Args:
    keys: int64[N].
    smallest: the smallest key that may be.
    largest: the largest.

Raises:
    TypeError: ``keys`` is no array, or one of another dtype.
    ValueError: it has another shape or is not contiguous.
)";

constexpr const char* kSplitByTable = R"(Split a request's keys by embedding table.

Args:
    keys: int64[N], sample-major: sample 0's keys of table 0, of table 1, ..., then sample 1's; N at most 2**31 - 1.
    row_ptrs: int32 or int64: one CSR over all slots of all samples, B * S + 1 offsets; or one CSR per table, table after
        table, each from 0, B * S + T offsets in all. Its length decides; with one table the two are the same.
    slots: slots of each of the T tables; their sum is S.

Returns:
    keys int64[N], table-major, which with one table are those given; row_ptrs int32[B * S + T], one CSR per table,
    each from 0; for each table, how many keys it has; and for each the most that one sample has of it. None where an
    offset falls, or a CSR does not begin with 0, or they do not end with N.

Raises:
    TypeError: an argument is no array, or one of another dtype.
    ValueError: an argument has another shape or is not contiguous, the length of ``row_ptrs`` is neither, or B is 0.
)";

constexpr const char* kSnapshot = R"(The native part of kernels.snapshot.Snapshot.)";

constexpr const char* kSnapshotFetch = R"(Read rows into ``out``, as ``HostTable.fetch`` does.

Raises:
    SnapshotError: the file is damaged where it was read, was cut short or written to since it was opened, or cannot
        be read; ``out`` then holds anything.
)";

constexpr const char* kSnapshotFetchPooled = R"(Pool bags of rows, as ``HostTable.fetch_pooled`` does.

Raises:
    SnapshotError: see ``fetch``.
)";

constexpr const char* kReadKeys = R"(Return the keys of rows [first, first + count) in the order of writing: int64[N].

Raises:
    SnapshotError: see ``fetch``; or a page that they lie in is not what was written.
    ValueError: there are not so many rows.
)";

constexpr const char* kReadItems = R"(Return keys and rows [first, first + count): int64[N], float32[N, D].

Raises:
    SnapshotError: see ``fetch``; or a page that they lie in is not what was written.
    ValueError: there are not so many rows.
)";

constexpr const char* kCheckIndex = R"(Read the whole index and check it.

Raises:
    SnapshotError: it is damaged.
)";

constexpr const char* kCheckContent = R"(Read the whole file, check every byte, and find every key.

Raises:
    SnapshotError: it is damaged.
)";

constexpr const char* kSnapshotWriter = R"(The native part of kernels.snapshot.write_snapshot.)";

constexpr const char* kAppend = R"(Write the next rows.

Args:
    keys: int64[N], C-contiguous, none of which came before.
    rows: float32[N, D], C-contiguous.

Raises:
    RowValueError: a value is none that ``row_dtype`` can hold.
    TableFullError: more rows came than were announced.
    ReservedKeyError: a key is reserved.
    ValueError: a key came before, or an argument has another shape or is not contiguous.
    TypeError: an argument is no array, or one of another dtype.
    OSError: the disk refuses.
)";

constexpr const char* kFinish = R"(Write what is left, the header last.

Args:
    source: 32 bytes that name what the rows came from.

Raises:
    OSError: the disk refuses.
    ValueError: ``source`` has another length.)";

constexpr const char* kLookupThreads =
    R"(Return how many threads may work on one lookup, see ``set_lookup_threads``.)";

constexpr const char* kSetLookupThreads = R"(Say how many threads may work on one lookup, of any table of this process.

Lookups of 16,384 keys and more are shared by their caller and the threads of one small pool, one lookup at a time; a
lookup that finds the pool at work does without it. The answer has the same bits. At first it is the number in the
environment's ``HOTROW_LOOKUP_THREADS``, else one thread per core that the process may use, at most 8.

Args:
    threads: 1 to 64, the caller among them; 1: lookups are not shared.

Raises:
    ValueError: ``threads`` is out of its range.
)";

}  // namespace hotrow::docs
