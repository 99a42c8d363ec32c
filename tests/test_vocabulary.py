from __future__ import annotations

from elastic_trainer.vocabulary import Token, Worker


def test_a_later_term_or_generation_is_a_later_token() -> None:
    assert Token(1, 9) < Token(2, 1) < Token(2, 2)
    assert (str(Token(2, 1)), str(Worker(3, 1))) == ("2-1", "w3.1")
