"""How many threads torch's operators use, for a while: the setting is the whole process's, so it is given back."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch's operators on so many threads inside, and as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def within(context: Callable[[], AbstractContextManager[None]], items: Iterator[Item]) -> Iterator[Item]:
    """The same items, each made inside a new `context()`; what is done between them is outside."""
    nothing = object()
    while True:
        with context():
            item = next(items, nothing)
        if item is nothing:
            return
        yield item  # type: ignore[misc]
