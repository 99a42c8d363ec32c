from __future__ import annotations

from dataclasses import asdict

from elastic_trainer.observability.account import PHASES, Account, Generation, Rebuild


def test_the_phases_of_a_rebuild_add_up_to_the_time_between_two_steps() -> None:
    rebuild = Rebuild()
    rebuild.noticed(10.1, last_step_at=10.0)
    rebuild.noticed(10.3, last_step_at=10.0)
    rebuild.ordered_at, rebuild.formed_at, rebuild.joined_at = 10.4, 10.6, 10.7

    phases = rebuild.phases(11.0)

    assert list(phases) == list(PHASES)
    assert phases == {"detect": 0.1, "free": 0.2, "plan": 0.1, "form": 0.2, "state": 0.1, "first step": 0.3}


def test_a_first_start_has_no_generation_to_leave() -> None:
    rebuild = Rebuild(ordered_at=5.0, formed_at=5.5, joined_at=6.0)

    assert rebuild.phases(7.0) == {"form": 0.5, "state": 0.5, "first step": 1.0}


def test_an_account_comes_back_as_it_was() -> None:
    account = Account(generations=[Generation(1, 1, 2, 0, "first start", 3.0, ["w0.0"], {"form": 0.1})])

    assert Account.from_dict(asdict(account)) == account
