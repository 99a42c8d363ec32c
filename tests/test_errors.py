from __future__ import annotations

import inspect

from elastic_trainer import errors


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = errors.__doc__ or ""
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, Exception):
            assert name in drawn, f"{name} is not in the tree"
            assert value is errors.ElasticTrainerError or issubclass(value, errors.ElasticTrainerError)


def test_a_near_name_is_suggested_and_a_far_one_is_not() -> None:
    assert errors.did_you_mean("lable", ["label", "image"]) == " Did you mean 'label'?"
    assert errors.did_you_mean("zzz", ["label", "image"]) == ""
