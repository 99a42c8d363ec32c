from __future__ import annotations

import pytest

from elastic_trainer.observability.progress import ProgressView
from elastic_trainer.observability.standing import Standing


def standing(step: int, *news: str) -> Standing:
    return Standing("running", step, 100, 0.25, 480.0, 5.0, 3, news, 0, False)


def test_outside_a_terminal_there_are_plain_lines_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressView("job") as view:
        view.show(standing(40, "generation 2: 3 workers from step 40: [w1.1] joins"))
        view.show(standing(41))

    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("] generation 2: 3 workers from step 40: [w1.1] joins")
    assert out[1].endswith("] step 40/100  running  loss 0.2500  480 samples/s  3 workers  about 12 s left")
    assert len(out) == 2, "plain lines come every few seconds only"
