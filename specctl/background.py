"""A library's call that takes long and is deaf to Ctrl+C: made in a thread, so that the signal is heard."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_PATIENCE = 1.0  # seconds that the call is given to end by itself


def interruptible_call(call: Callable[[Iterator[Item]], Result], items: Iterable[Item]) -> Result:
    """Return `call(items)`, or raise what it raised. What a signal raises ends the wait at once, and the items.

    A call that asks for no more items then runs on until it or the process ends; its result is dropped.
    """
    stopped, done = threading.Event(), threading.Event()
    results: list[Result] = []
    errors: list[BaseException] = []

    def until_stopped() -> Iterator[Item]:
        for item in items:
            if stopped.is_set():
                return
            yield item

    def run() -> None:
        try:
            results.append(call(until_stopped()))
        except BaseException as error:  # for the caller to raise
            errors.append(error)
        finally:
            done.set()

    try:
        threading.Thread(target=run, daemon=True).start()
        done.wait()
    except BaseException:
        stopped.set()
        done.wait(_PATIENCE)  # a thread that wants back into a Python that shuts down would abort the process
        raise
    if errors:
        raise errors[0]
    return results[0]
