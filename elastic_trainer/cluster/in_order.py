"""Puts numbered messages back into the order in which they were sent.

Ray runs the calls of an asynchronous actor as they arrive, and two calls of one caller may change places.
Pure.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class InOrder(Generic[T]):
    """The messages of one sender, numbered from 0 without gaps."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, T] = {}

    def take(self, number: int, message: T) -> list[T]:
        """What is due now that this message is here; nothing when one before it is still on its way."""
        if number >= self._next:
            self._early[number] = message
        due = []
        while self._next in self._early:
            due.append(self._early.pop(self._next))
            self._next += 1
        return due
