from __future__ import annotations

import json

from elastic_trainer.data.batch_plan import expected_digest
from elastic_trainer.data.ledger import Audit, LedgerLine, audit
from elastic_trainer.data.order import SampleOrder
from elastic_trainer.vocabulary import Token

ORDER = SampleOrder(samples=53, row_group=7, global_batch=12, logical_ranks=3, window=3, seed=9)


def line(
    step: int, token: tuple[int, int] = (1, 1), *, samples: int | None = None, digest: int | None = None
) -> LedgerLine:
    right = ORDER.samples_in(step) if samples is None else samples
    return LedgerLine(step, Token(*token), right, expected_digest(ORDER, step) if digest is None else digest)


def test_a_right_ledger_has_nothing_missing_or_repeated() -> None:
    found = audit(ORDER, (json.loads(json.dumps(line(step).to_json())) for step in range(10)))

    assert found.summary() == {
        "steps_redone": 0,
        "samples_trained": 2 * 53,
        "samples_skipped": 0,
        "samples_missing": 0,
        "samples_repeated": 0,
    }


def test_a_wrong_digest_a_wrong_count_and_a_gap_are_named_and_nothing_is_claimed() -> None:
    found = Audit(ORDER)
    for each in (line(0), line(1, digest=1), line(2, samples=11), line(4)):
        found.add(each)

    assert found.bad_steps() == [1, 2, 3]
    assert found.summary()["samples_missing"] is None
    assert found.summary()["samples_repeated"] is None
    assert found.steps == 3


def test_a_newer_generations_line_replaces_an_older_one() -> None:
    found = Audit(ORDER)

    assert found.add(line(0, (1, 1), digest=5))
    assert not found.add(line(0, (1, 1)))
    assert found.add(line(0, (1, 2)))
    assert not found.add(line(0, (1, 1), digest=5))
    assert found.bad_steps() == []
    assert found.steps_redone == 1


def test_an_empty_ledger_is_empty() -> None:
    assert Audit(ORDER).steps == 0
    assert Audit(ORDER).bad_steps() == []


def test_lines_beyond_a_return_to_a_saved_step_are_void() -> None:
    lines = [line(step, (1, 1)).to_json() for step in range(8)] + [line(step, (1, 2)).to_json() for step in range(4, 6)]

    found = audit(ORDER, [*lines, lines[7]], [(Token(1, 2), 4)])

    assert (found.steps, found.bad_steps(6)) == (6, [])
    assert found.bad_steps(7) == [6]
    assert found.steps_redone == 4


def test_an_audit_goes_back_and_goes_on_from_what_was_kept() -> None:
    whole = Audit(ORDER)
    for step in range(10):
        whole.add(line(step))
    kept = Audit.from_dict(ORDER, json.loads(json.dumps(whole.to_dict(6))))
    whole.go_back_to(6)

    assert whole.steps_redone == 4
    for each in (whole, kept):
        assert (each.steps, each.bad_steps(6)) == (6, [])
        for step in range(6, 10):
            assert each.add(line(step, (1, 2)))
        assert each.summary()["samples_trained"] == 2 * 53
        assert each.bad_steps(10) == []
