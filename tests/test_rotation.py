from __future__ import annotations

import pytest

from tests import rotation


@pytest.mark.parametrize(("cases", "count", "parts"), [(3, 1, 3), (16, 1, 2), (20, 3, 1), (4, 2, 4), (8, 16, 1)])
def test_every_case_has_its_day(cases: int, count: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    for day in range(20_000, 20_000 + cases * parts):
        monkeypatch.setattr(rotation, "TODAY", day)
        due = {each.values[0] for each in rotation.rotating(range(cases), count, parts - 1, parts) if not each.marks}
        assert len(due) == (min(cases, count) if day % parts == parts - 1 else 0)
        seen |= due
    assert seen == set(range(cases))
