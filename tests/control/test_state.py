from __future__ import annotations

import json

from elastic_trainer.control.state import Phase, Save, State, Tries, WorkerState
from elastic_trainer.vocabulary import SavedStep, Stage, Token, Worker


def test_a_state_goes_to_json_and_back() -> None:
    state = State(term=2, phase=Phase.ABORTING, generation=7, group=[Worker(0, 1)], store=("10.0.0.1", 4000))
    state.workers[0] = WorkerState(Worker(0, 1), Stage.TRAINING, holds=5, formed=True)
    state.token, state.saved = Token(2, 7), [SavedStep(5, "steps/5", "ab")]
    state.save, state.settled = Save(9, Token(2, 6), [Worker(0, 1)], [Worker(0, 1)]), (Token(2, 5), 5)
    state.tries.append(Tries(("loss", "ValueError", "task.py:1"), 3, ["generation 2-6"]))

    again = State.from_dict(json.loads(json.dumps(state.to_dict())))

    assert again == state
    assert again.save == state.save
    assert again.workers[0].stage is Stage.TRAINING
