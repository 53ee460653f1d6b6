"""Sequences whose elements are made when they are asked for: a world over millions of goals opens at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

Element = TypeVar("Element", covariant=True)


class LazySequence(Sequence[Element]):
    """A subclass says how many elements there are and makes one; indices and slices mean what they do for a list."""

    @abstractmethod
    def _at(self, index: int) -> Element:
        """The element at an index that is in range, from 0."""

    @overload
    def __getitem__(self, index: int) -> Element: ...

    @overload
    def __getitem__(self, index: slice) -> list[Element]: ...

    def __getitem__(self, index: int | slice) -> Element | list[Element]:
        if isinstance(index, slice):
            return [self._at(each) for each in range(*index.indices(len(self)))]
        own = int(index)  # also numpy's integers, whose arithmetic overflows where Python's does not
        own = own + len(self) if own < 0 else own
        if not 0 <= own < len(self):
            raise IndexError(f"element {index} of {len(self)}")
        return self._at(own)
