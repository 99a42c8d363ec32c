"""Decides what a run does about each event. Pure: no clock, randomness, I/O, Ray or torch."""
