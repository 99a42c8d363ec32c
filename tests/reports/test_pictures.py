"""The pictures are drawn for runs of every kind, and are pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from elastic_trainer.errors import ConfigError
from elastic_trainer.observability.account import Generation
from elastic_trainer.reports import pictures
from elastic_trainer.reports.pictures import draw
from elastic_trainer.storage.object_store import ObjectStore
from tests.reports.test_story import GENERATIONS, record

MANY = [Generation(n, 1, 1, n, "again", 100.0 + n, [f"w0.{n}"], {}, 100.9 + n) for n in range(1, 40)]


@pytest.mark.parametrize("generations", [GENERATIONS, GENERATIONS[:1], MANY], ids=["three", "one", "many"])
def test_both_pictures_show_something(generations: list[Generation], tmp_path: Path) -> None:
    paths = draw(record(generations), ObjectStore(str(tmp_path)))

    assert paths == [f"{tmp_path}/report/loss.png", f"{tmp_path}/report/timeline.png"]
    for path in paths:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("L"))
        assert pixels.shape[1] > 800
        assert 0.001 < (pixels < 200).mean() < 0.6, "nearly nothing, or nearly everything, is dark"


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "can_draw", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'elastic-trainer\[plots\]'"):
        draw(record(GENERATIONS), ObjectStore(str(tmp_path)))
