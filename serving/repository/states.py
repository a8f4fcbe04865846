"""What the repository index says of each version, and why a version is not served from the files that it has."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kernels.errors import HotrowError
from serving.errors import printable, told
from serving.metrics import MetricSample

logger = logging.getLogger("hotrow.repository")

#: The reason of a version that a client has unloaded.
UNLOADED = "unloaded"
#: A model's name and a version's number; 0 stands for the whole model.
Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ModelState:
    """One line of Triton's repository index; all texts except the name are empty for a model that was never loaded.

    A version that serves has a reason if its folder has other files now, and they cannot be loaded.
    """

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""
    digest: str = ""

    @classmethod
    def of(cls, place: Place, state: str, reason: str = "", digest: str = "") -> "ModelState":
        """The state of a version, or of a whole model."""
        name, number = place
        return cls(printable(name), str(number or ""), state, reason, digest)

    def sample(self) -> MetricSample:
        """The state as a sample for the metrics page."""
        words = {"READY": "degraded" if self.reason else "ready"}
        words["UNAVAILABLE"] = UNLOADED if self.reason == UNLOADED else "unavailable"
        state = words.get(self.state, self.state.lower())
        labels = (("model", self.name), ("version", self.version), ("state", state))
        help_text = "1 for the state of a version: ready, degraded, unavailable, loading, unloading or unloaded."
        return MetricSample("hotrow_model_state", help_text, labels, 1, is_gauge=True)


class VersionStates:
    """States of versions that do not serve, and faults of all versions. The repository's lock guards changes."""

    def __init__(self) -> None:
        """Know no version."""
        self._states: dict[Place, ModelState] = {}  # of versions that do not serve
        self._faults: dict[Place, str] = {}  # why the files of a version that serves cannot be loaded
        self._logged: set[Place] = set()  # whose fault was logged and is not fixed

    def show(self, name: str, number: int, state: str, reason: str = "") -> None:
        """Set the state of a version that does not serve."""
        self._states[name, number] = ModelState.of((name, number), state, reason)

    def note_fault(self, name: str, number: int, err: HotrowError, *, serves: bool = False) -> None:
        """Show why the files of a version cannot be loaded, and log it if that is new."""
        place = name, number
        if serves:
            self._faults[place] = told(err)
        else:
            self.show(name, number, "UNAVAILABLE", told(err))
        if place not in self._logged:
            self._logged.add(place)
            logger.error("model %s: %s", name, told(err))

    def log_again(self, name: str) -> None:
        """Log the next fault of a model, even if this fault was logged before."""
        self._logged = {place for place in self._logged if place[0] != name}

    def clear(self, name: str, number: int) -> None:
        """Forget the state and the fault of a version: its folder's files serve, or its folder is gone."""
        for of_places in (self._states, self._faults):
            of_places.pop((name, number), None)
        self._logged.discard((name, number))

    def keep_versions(self, name: str, numbers: Collection[int]) -> None:
        """Forget the versions that a model's folder no longer has."""
        for place in self._places():
            if place[0] == name and place[1] not in numbers:
                self.clear(*place)

    def keep_models(self, names: Collection[str]) -> None:
        """Forget the models whose folders are gone."""
        for place in self._places():
            if place[0] not in names:
                self.clear(*place)

    def _places(self) -> set[Place]:
        return {*self._states, *self._faults, *self._logged}

    def now(self) -> Mapping[Place, ModelState]:
        """The states of versions that do not serve."""
        return dict(self._states)

    def fault(self, name: str, number: int) -> str:
        """Why the files of a version that serves cannot be loaded; empty if they can."""
        return self._faults.get((name, number), "")
