from __future__ import annotations

from elastic_trainer.cluster.messages import Acknowledged
from elastic_trainer.cluster.outbox import Outbox
from elastic_trainer.observability.lines import EvaluationLine, NoteLine, StepLine
from elastic_trainer.vocabulary import Token

FIRST = Token(1, 1)


def step(number: int, token: Token = FIRST) -> StepLine:
    return StepLine(number, token, 24, 0, 0.5, 2, 0.0, 0.1, 0.0)


def test_rank_0_sends_each_line_once() -> None:
    outbox = Outbox()
    outbox.become(sender=True)
    outbox.record(step(0))

    assert outbox.take() == (step(0),)
    assert outbox.take() == ()


def test_a_new_rank_0_sends_what_was_not_acknowledged() -> None:
    outbox = Outbox()
    evaluation = EvaluationLine(2, Token(1, 1), {"x": 1.0})
    for line in (step(0), step(1), evaluation, step(2)):
        outbox.record(line)
    assert outbox.take() == ()

    outbox.acknowledge(Acknowledged(2, Token(1, 1)))
    outbox.become(sender=True)

    assert outbox.take() == (evaluation, step(2))


def test_what_was_sent_and_acknowledged_is_forgotten() -> None:
    outbox = Outbox()
    outbox.become(sender=True)
    for number in range(3):
        outbox.record(step(number))
    outbox.take()

    outbox.acknowledge(Acknowledged(3, Token(1, 1)))
    outbox.become(sender=False)
    outbox.become(sender=True)

    assert outbox.take() == ()


def test_notes_go_out_from_any_rank_once() -> None:
    outbox = Outbox()
    note = NoteLine("w0.0", "something")
    outbox.record(step(0))
    outbox.record(note)

    assert outbox.take() == (note,)
    assert outbox.take() == ()
    outbox.become(sender=True)
    assert outbox.take() == (step(0),)


def test_an_answer_from_before_a_return_voids_no_line_of_the_steps_done_again() -> None:
    outbox = Outbox()
    outbox.become(sender=True)
    again = [step(number, Token(1, 2)) for number in range(100, 103)]
    for line in (step(100), step(101), *again):
        outbox.record(line)

    outbox.acknowledge(Acknowledged(150, Token(1, 1)))

    assert outbox.take() == tuple(again)
