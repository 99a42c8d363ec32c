"""Which engine makes the samples."""

from __future__ import annotations

import pytest

from elastic_trainer.data.choice import choose_engine


@pytest.mark.parametrize(
    ("wanted", "preprocesses", "beside", "is_ray", "words"),
    [
        ("auto", True, 2, True, "preprocessed by Ray Data on 3 CPUs"),
        ("auto", False, 2, False, "read by the workers, as there is nothing to preprocess"),
        ("ray", False, 2, True, "read by Ray Data on 3 CPUs"),
        ("ray", False, 1, False, "read by the workers: beside 2 of them the cluster has no 3 CPUs left"),
        ("auto", True, 1, False, "read and preprocessed by the workers: beside 2"),
        ("direct", True, 2, False, "read by the workers (data.engine)"),
        ("ray", None, 2, False, "a training function says only while it runs"),
        ("auto", None, 2, False, "data: read by the workers"),
    ],
)
def test_the_engine_is_chosen_and_said(
    wanted: str, preprocesses: bool | None, beside: int, is_ray: bool, words: str
) -> None:
    found, said = choose_engine(wanted, cpus=3, preprocesses=preprocesses, workers=2, workers_beside=beside)

    assert found is is_ray
    assert words in said
