"""Whether a tier before a database goes with the very state that the database is in: by seals, see ``WitnessStore``."""

from serving.storage.store import SealedStore, Store, WitnessStore, sealed_by


def is_of_another_state(store: Store, slowest: Store, table: str) -> bool:
    """Whether ``store`` has changes that ``slowest`` once had, or lacks some: one of the two was put back.

    Of a database that it bears no seal of that cannot be told.
    """
    if not isinstance(slowest, WitnessStore) or not isinstance(store, SealedStore):
        return False
    seal = slowest.seal(table)
    if seal is None:
        return False
    return any(sealed_by(one) == sealed_by(seal) and one != seal for one in store.seals(table))


def put_seal(store: Store, slowest: Store, table: str) -> None:
    """Have ``store`` remember that its open ``table`` goes with the state that ``slowest`` is in."""
    if isinstance(slowest, WitnessStore) and isinstance(store, SealedStore):
        seal = slowest.seal(table)
        if seal is not None:
            store.put_seal(table, seal, seal, has_changed=False)
