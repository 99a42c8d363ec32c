"""Steps: the task and loop APIs, the process group, gradient reduction, state and evaluation."""
