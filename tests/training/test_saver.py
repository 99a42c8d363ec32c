"""Saving and restoring by whole worker groups in plain processes: any number saves, any number goes on."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

import pytest

from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.training.settings import TrainSettings
from tests.harness import Harness, Outcome, settings_for
from tests.rotation import rotating
from tests.tasks import NetTask, RestoredTask

STEPS, MORE = 30, 20  # the epoch of 22 steps ends before and behind the save
SLOW = functools.partial(RestoredTask, delay_s=0.002)


@pytest.fixture(scope="module")
def whole(dataset: str) -> Outcome:
    return Harness(NetTask, settings_for(dataset, steps=STEPS + MORE), workers=1).run()


def assert_continues(first: Outcome, second: Outcome, whole: Outcome) -> None:
    assert second.status == "finished"
    assert second.audit.bad_steps(0) == [] or min(second.audit.bad_steps(0)) < first.saved[-1].steps
    start = len(whole.losses) - len(second.losses)
    assert second.losses == pytest.approx(whole.losses[start:], rel=1e-9)


PAIRS = [(save, load) for save in range(1, 7) for load in range(1, 7)]


@pytest.mark.parametrize(("save", "load"), rotating(PAIRS, 3))
def test_what_some_ranks_saved_any_number_restores(
    save: int, load: int, dataset: str, whole: Outcome, tmp_path: Path
) -> None:
    first = Harness(NetTask, settings_for(dataset, steps=STEPS, run_url=str(tmp_path)), workers=save).run()
    assert [each.steps for each in first.saved] == [STEPS]

    more = settings_for(dataset, steps=STEPS + MORE, run_url=str(tmp_path))
    second = Harness(RestoredTask, more, workers=load).run()

    digest = first.final[0]["digest"]
    assert {(result["began_at"], result["began_with"]) for result in second.final.values()} == {(STEPS, digest)}
    assert len(second.losses) == MORE
    assert_continues(first, second, whole)


def test_a_stop_saves_the_step_at_which_it_ends(dataset: str, whole: Outcome, tmp_path: Path) -> None:
    settings = settings_for(dataset, steps=STEPS + MORE, run_url=str(tmp_path))

    def stop(harness: Harness, done: int) -> None:
        if done == 7:
            harness.put(e.StopRequested("a test"))

    first = Harness(SLOW, settings, workers=3, on_step=stop).run()
    second = Harness(SLOW, settings, workers=2).run()

    assert first.status == "stopped"
    assert first.saved[-1].steps == first.audit.steps >= 7
    assert second.losses == pytest.approx(whole.losses[first.audit.steps :], rel=1e-9)


def test_a_rank_that_dies_before_the_last_save_does_not_spoil_it(dataset: str, whole: Outcome, tmp_path: Path) -> None:
    settings = settings_for(dataset, steps=STEPS + MORE, run_url=str(tmp_path))

    def stop(harness: Harness, done: int) -> None:
        if done == 7:
            harness.put(e.StopRequested("a pre-emption"))
            harness.kill(1)

    first = Harness(SLOW, settings, workers=3, on_step=stop).run()
    second = Harness(SLOW, settings, workers=3).run()

    assert first.status == "stopped"
    assert first.saved[-1].steps == first.audit.steps >= 7
    assert second.losses == pytest.approx(whole.losses[first.audit.steps :], rel=1e-9)


def test_all_die_and_the_run_goes_back_to_the_newest_saved_step(dataset: str, whole: Outcome) -> None:
    settings = settings_for(dataset, steps=STEPS + MORE, save_every=5)
    killed = []

    def kill_all(harness: Harness, done: int) -> None:
        if done >= 18 and harness.committer.history.saved and not killed:
            killed.append(harness.committer.history.saved[-1].steps)
            for worker_id in range(3):
                harness.kill(worker_id)

    outcome = Harness(SLOW, settings, workers=3, on_step=kill_all).run()

    assert outcome.status == "finished"
    assert outcome.audit.bad_steps(STEPS + MORE) == []
    assert outcome.losses == pytest.approx(whole.losses, rel=1e-9)
    assert [step for _, step in outcome.generations][1] >= killed[0]
    assert outcome.audit.steps_redone > 0


def test_all_die_before_anything_was_saved_and_the_run_begins_anew(dataset: str, whole: Outcome) -> None:
    killed = []

    def kill_all(harness: Harness, done: int) -> None:
        if done >= 9 and not killed:
            killed.append(done)
            for worker_id in range(2):
                harness.kill(worker_id)

    outcome = Harness(SLOW, settings_for(dataset, steps=STEPS + MORE), workers=2, on_step=kill_all).run()

    assert outcome.losses == pytest.approx(whole.losses, rel=1e-9)
    assert outcome.generations[1][1] == 0


@pytest.mark.parametrize("victim", rotating([0, 1, 2], 1))
def test_a_rank_that_dies_in_a_save_does_not_spoil_it(victim: int, dataset: str, whole: Outcome) -> None:
    settings = settings_for(dataset, steps=STEPS + MORE, save_every=10)
    killed: list[int] = []

    def kill_in_save(harness: Harness, event: e.Event) -> None:
        if isinstance(event, e.SaveBegan) and event.worker.worker_id == victim and not killed:
            killed.append(event.steps)
            harness.kill(victim, signal.SIGKILL)

    harness = Harness(SLOW, settings, workers=3, on_event=kill_in_save, restart_delay_s=0.2)
    outcome = harness.run()

    assert outcome.losses == pytest.approx(whole.losses, rel=1e-9)
    assert killed[0] in [each.steps for each in outcome.saved], [str(effect) for effect in harness.effects]


def test_damaged_steps_are_named_and_the_one_before_is_taken(dataset: str, whole: Outcome, tmp_path: Path) -> None:
    settings = settings_for(dataset, steps=STEPS, run_url=str(tmp_path), save_every=10)
    first = Harness(SLOW, settings, workers=2).run()
    for damaged in first.saved[1:]:
        piece = tmp_path / damaged.path.replace("MANIFEST.json", "r0.bin")
        piece.write_bytes(piece.read_bytes()[::-1])

    second = Harness(SLOW, settings_for(dataset, steps=STEPS + MORE, run_url=str(tmp_path)), workers=2).run()

    assert second.generations[0] == (2, first.saved[0].steps)
    assert any(f"cannot restore step {STEPS}" in note and "r0.bin" in note for note in second.notes)
    assert second.losses == pytest.approx(whole.losses[first.saved[0].steps :], rel=1e-9)
    assert [each.steps for each in second.saved] == [first.saved[0].steps, STEPS + MORE]


def test_when_nothing_can_be_restored_the_run_does_not_start_over(dataset: str, tmp_path: Path) -> None:
    first = Harness(NetTask, settings_for(dataset, steps=STEPS, run_url=str(tmp_path)), workers=2).run()
    (tmp_path / first.saved[0].path).write_text("{}")

    second = Harness(NetTask, settings_for(dataset, steps=STEPS + MORE, run_url=str(tmp_path)), workers=2).run()

    assert second.status == "failed"
    assert "no saved step can be restored" in second.reason
    assert "not the manifest that the log names" in second.reason
    assert second.losses == []


def test_a_store_that_is_gone_stops_no_training(dataset: str, whole: Outcome, tmp_path: Path) -> None:
    settings = settings_for(dataset, steps=STEPS + MORE, run_url=str(tmp_path / "run"), save_every=10, storage_s=1.0)
    harness = Harness(SLOW, settings, workers=2)
    (tmp_path / "run/steps").write_text("a file where the folder should be")

    outcome = harness.run()

    assert outcome.status == "finished"
    assert outcome.losses == pytest.approx(whole.losses, rel=1e-9)
    told = [effect.reason for effect in harness.effects if isinstance(effect, f.Tell)]
    assert any("could not be saved, training goes on" in reason and "Not a directory" in reason for reason in told)
    assert harness.machine.state.saves_failed >= 1
    assert "nothing was saved" in outcome.reason


def test_a_changed_model_is_told_when_it_is_restored(dataset: str, tmp_path: Path) -> None:
    from tests.tasks import PlainTask

    Harness(NetTask, settings_for(dataset, steps=STEPS, run_url=str(tmp_path)), workers=1).run()

    second = Harness(PlainTask, settings_for(dataset, steps=STEPS + MORE, run_url=str(tmp_path)), workers=1).run()

    assert second.status == "failed"
    assert "the run's state of 'model' does not fit what the task builds now" in second.reason


def test_a_save_by_time_is_one_for_all_ranks(dataset: str) -> None:
    settings: TrainSettings = settings_for(dataset, steps=STEPS + MORE, save_every_s=0.05)

    outcome = Harness(SLOW, settings, workers=3).run()

    assert len(outcome.saved) >= 3
