"""What every type of ``volatile_db`` has."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from serving.config import keys_without_effect
from serving.config.clause import Clause, Magnitude, Switch

_POLICIES = ("random", "least_used", "oldest")
# HPS's spellings of overflow_policy, with their names in HPS and without the verb.
RAM_POLICIES = {spelling: f"evict_{name}" for name in _POLICIES for spelling in (f"evict_{name}", name)}
REDIS_POLICIES = {spelling: name.removeprefix("evict_") for spelling, name in RAM_POLICIES.items()}


class VolatileClause(Clause):
    """One tier of ``volatile_db``. It may have the names of the keys of all types.

    Attributes:
        spellings: HPS's spellings of the type. The first is the value of ``type``.
        types: the records of all types.
    """

    where: ClassVar[str] = "volatile_db"
    spellings: ClassVar[tuple[str, ...]] = ()
    types: ClassVar[list[type["VolatileClause"]]] = []

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Add the record of a type to ``types``."""
        super().__pydantic_init_subclass__(**kwargs)
        if cls.spellings:
            cls.types.append(cls)

    @classmethod
    def known_keys(cls) -> set[str]:
        """See ``Clause``."""
        return keys_without_effect.all_keys(cls.where).union(*(one.fields_by_key() for one in cls.types))

    @classmethod
    def refuse(cls, key: str) -> None:
        """Raise the error for a key of another type, or for an unknown key."""
        having = (one for one in cls.types if key in one.fields_by_key() or key in one.ignored_keys(one.spellings[0]))
        if owners := {one.spellings[0] for one in having if one is not DisabledConfig}:
            raise ValueError(f"{key}: only a {' or '.join(sorted(owners))} has it, the type is {cls.spellings[0]}")
        super().refuse(key)


class DisabledConfig(VolatileClause):
    """No tier. Only the names of the other keys are checked."""

    spellings: ClassVar[tuple[str, ...]] = ("disabled", "disable", "none")

    type: Literal["disabled"] = "disabled"


class VolatileTier(VolatileClause):
    """The keys of every type that holds rows."""

    cache_missed_embeddings: Switch = False
    initialize_after_startup: Switch = True
    initial_cache_rate: Annotated[Magnitude, Field(le=1.0)] = 1.0

    @model_validator(mode="after")
    def _fills_what_can_be_filled(self) -> Self:
        if self.initial_cache_rate < 1.0 and self.spellings[0] != "hash_map":
            raise ValueError("initial_cache_rate: only RAM is filled in part; other tiers get whole tables")
        for key in ("initial_cache_rate", "hot_keys"):
            if key in self.model_fields_set and not self.initialize_after_startup:
                raise ValueError(f"{key}: initialize_after_startup is false, so nothing is loaded")
        return self
