"""What a log comes to, with and without compaction."""

from __future__ import annotations

import json
from typing import Any

from elastic_trainer.checkpoint.history import fold, resumptions
from elastic_trainer.storage.log import Entry
from elastic_trainer.vocabulary import SavedStep, Token


def entry(kind: str, written_in: int, **values: Any) -> Entry:
    return Entry(0, kind, written_in, 1.0, "writer", 0, values)


def saved(steps: int, term: int, generation: int, **evaluation: float) -> Entry:
    return entry(
        "saved",
        term,
        steps=steps,
        path=f"steps/{steps}",
        sha256=str(steps),
        token=[term, generation],
        evaluation=evaluation,
        audit={"steps": steps},
    )


STORY = [
    entry("term", 1, owner="a", config={"name": "x"}, code="c"),
    saved(10, 1, 1, accuracy=0.5),
    saved(20, 1, 3),
    saved(30, 1, 3),
    entry("removed", 1, paths=["steps/10"]),
    entry("term", 2, owner="b", config={"name": "x"}, code="c"),
    entry("resumed", 2, token=[2, 4], steps=20),
    saved(25, 2, 4),
]


def test_the_history_of_a_story() -> None:
    history = fold(STORY)

    assert (history.term, history.owner, history.generation) == (2, "b", 4)
    assert [each.steps for each in history.saved] == [20, 25]
    assert history.newest == SavedStep(25, "steps/25", "25")
    assert history.audit == {"steps": 25}
    assert history.ended is None


def test_the_end_is_the_end_until_another_term() -> None:
    ended = [*STORY, entry("ended", 2, status="finished", reason="done")]

    assert fold(ended).ended == "finished"
    assert fold([*ended, entry("term", 3, owner="c", config={}, code="")]).ended is None


def test_a_compacted_entry_stands_for_all_before_it() -> None:
    for cut in range(len(STORY) + 1):
        values = json.loads(json.dumps(fold(STORY[:cut]).to_dict()))
        compacted = fold([entry("compacted", 2, **values), *STORY[cut:]])
        assert compacted.to_dict() == fold(STORY).to_dict()


def test_every_return_to_a_saved_step_is_told() -> None:
    assert [(each.token, each.steps) for each in resumptions(STORY)] == [(Token(2, 4), 20)]
