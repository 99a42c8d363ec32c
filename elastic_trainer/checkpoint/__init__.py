"""Remembers: how the state of a step is written, found again and kept."""
