"""What a run's log comes to: its term and configuration, what is saved, how it stands.

Pure: entries come in as data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic_trainer.storage.log import Entry
from elastic_trainer.vocabulary import Rollback, SavedStep, Token


@dataclass(frozen=True)
class Resumption:
    """From here on lines of `steps` and later with an older token than `token` are void."""

    token: Token
    steps: int


@dataclass
class History:
    """The run after its last entry."""

    term: int = 0
    owner: str = ""  # the mark of the controller that wrote the newest term
    generation: int = 0  # the highest that the log knows of
    config: dict[str, Any] | None = None
    code: str = ""
    saved: list[SavedStep] = field(default_factory=list)  # what can be restored, oldest first
    values: dict[str, dict[str, float]] = field(default_factory=dict)  # evaluations by folder of the saved step
    rollback: Rollback | None = None  # the last one
    scaling: tuple[str, int, int] | None = None  # the owner for whom it counts, the least and the most workers
    audit: dict[str, Any] = field(default_factory=dict)  # the account of the ledger up to the newest saved step
    ended: str | None = None  # the status, when the last thing that happened was the end
    reason: str = ""
    began_at: float = 0.0
    at: float = 0.0

    @property
    def newest(self) -> SavedStep | None:
        """The newest saved step."""
        return self.saved[-1] if self.saved else None

    def add(self, entry: Entry) -> None:
        """Take the next entry."""
        values = entry.values
        self.at = entry.at
        self.term = max(self.term, entry.term)
        match entry.kind:
            case "compacted":
                self._expand(values)
            case "term":
                self.began_at = self.began_at or entry.at
                self.owner, self.config, self.code = values["owner"], values["config"], values["code"]
                self.ended, self.reason = None, ""
            case "saved":
                saved = SavedStep(values["steps"], values["path"], values["sha256"])
                self.generation = max(self.generation, values["token"][1])
                self.saved = [each for each in self.saved if each.path != saved.path] + [saved]
                self.values[saved.path] = values["evaluation"]
                self.audit = values["audit"]
            case "removed":
                gone = set(values["paths"])
                self.saved = [each for each in self.saved if each.path not in gone]
                self.values = {path: found for path, found in self.values.items() if path not in gone}
            case "resumed":
                # what was saved beyond could not be restored; it must not be preferred to what comes now
                self.generation = max(self.generation, values["token"][1])
                self.saved = [each for each in self.saved if each.steps <= values["steps"]]
                self.rollback = Rollback.of(values.get("rollback")) or self.rollback
            case "scaled":
                self.scaling = (values["owner"], values["least"], values["most"])
            case "ended":
                self.ended, self.reason = values["status"], values["reason"]

    def to_dict(self) -> dict[str, Any]:
        """As the values of a compacted entry."""
        return asdict(self)

    def _expand(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        self.saved = [SavedStep(*each) for each in values["saved"]]
        self.rollback = Rollback.of(values["rollback"])
        scaling = values.get("scaling")
        self.scaling = None if scaling is None else (scaling[0], scaling[1], scaling[2])


def fold(entries: Iterable[Entry]) -> History:
    """The history that entries tell."""
    history = History()
    for entry in entries:
        history.add(entry)
    return history


def resumptions(entries: Iterable[Entry]) -> list[Resumption]:
    """Every time that a run went back to a saved step, in order; of all entries, not only the newest."""
    return [
        Resumption(Token(*entry.values["token"]), entry.values["steps"]) for entry in entries if entry.kind == "resumed"
    ]
