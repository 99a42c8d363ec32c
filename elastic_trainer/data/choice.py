"""Which data engine makes a run's samples, and why, in words.

Pure: no I/O, no clock.
"""

from __future__ import annotations


def choose_engine(
    wanted: str, *, cpus: int, preprocesses: bool | None, workers: int, workers_beside: int
) -> tuple[bool, str]:
    """Whether Ray Data makes the samples.

    Args:
        wanted: `data.engine`: auto, ray or direct.
        cpus: `data.cpus`, which Ray Data would have.
        preprocesses: Whether the task has a preprocess; None when only its own code knows, as in a function.
        workers: How many are to train.
        workers_beside: How many fit into the cluster beside those CPUs.
    """
    if wanted == "direct":
        return False, "data: read by the workers (data.engine)"
    if preprocesses is None:
        why = "a training function says only while it runs what it preprocesses"
        return False, f"data: read by the workers{f': {why}' if wanted == 'ray' else ''}"
    if wanted == "auto" and not preprocesses:
        return False, "data: read by the workers, as there is nothing to preprocess"
    shown = f"{cpus} CPU" + ("s" if cpus > 1 else "")
    work = "preprocessed" if preprocesses else "read"
    if workers_beside < workers:
        return False, (
            f"data: {'read and preprocessed' if preprocesses else 'read'} by the workers: beside {workers} of them the "
            f"cluster has no {shown} left for Ray Data (data.cpus)"
        )
    return True, f"data: {work} by Ray Data on {shown}"
