"""HugeCTR v3.0's single file of a table, packed row by row."""

import struct


def write_single_file(path, keys, vectors, key_type="I64", slot_ids=None):
    """Write a table; with ``slot_ids``, the rows are those of a localized embedding."""
    row = f"<{'q' if key_type == 'I64' else 'I'}{'' if slot_ids is None else 'Q'}{vectors.shape[1]}f"
    slots = [()] * len(keys) if slot_ids is None else [(int(slot_id),) for slot_id in slot_ids]
    rows = zip(keys.tolist(), slots, vectors.tolist(), strict=True)
    path.write_bytes(b"".join(struct.pack(row, key, *slot, *vector) for key, slot, vector in rows))
