from __future__ import annotations

import json

from elastic_trainer.control.state import Phase, Stage, State, Tries, WorkerState
from elastic_trainer.vocabulary import Token, Worker


def test_a_state_goes_to_json_and_back() -> None:
    state = State(term=2, phase=Phase.ABORTING, generation=7, group=[Worker(0, 1)], store=("10.0.0.1", 4000))
    state.workers[0] = WorkerState(Worker(0, 1), Stage.TRAINING, holds=5, formed=True)
    state.tries.append(Tries(("loss", "ValueError", "task.py:1"), 3, ["generation 2-6"]))

    again = State.from_dict(json.loads(json.dumps(state.to_dict())))

    assert again == state
    assert again.token == Token(2, 7)
    assert again.workers[0].stage is Stage.TRAINING
