"""Keeps a run's files."""
