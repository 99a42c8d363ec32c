"""Ray Data as this package uses it: in order, without progress bars of its own, and leaving the process's defaults."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

from ray.data import DataContext
from ray.util.annotations import RayDeprecationWarning


@contextlib.contextmanager
def quiet_context() -> Iterator[DataContext]:
    """A context of Ray Data for the executions that are begun inside."""
    with warnings.catch_warnings():
        # Ray warns of options that it sets itself when a context is copied, and of the one that says where tasks run,
        # which Ray 2.64 will drop; nothing else says it in 2.60
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", RayDeprecationWarning)
        context = DataContext.get_current().copy()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.execution_options.preserve_order = True
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        with DataContext.current(context):
            yield context
