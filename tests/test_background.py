"""A call that hears no signal is waited for in a way that does, and what it does is what it would have done."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from specctl.background import interruptible_call
from specctl.errors import UsageError
from specctl.tokenizer import Tokenizer


def test_results_and_errors_are_the_calls_own() -> None:
    assert interruptible_call(list, "abc") == ["a", "b", "c"]
    with pytest.raises(ZeroDivisionError):
        interruptible_call(lambda items: [1 // item for item in items], [1, 0])

    def broken() -> Iterator[str]:
        yield "text " * 100
        raise UsageError("a bad byte")

    with pytest.raises(UsageError, match="a bad byte"):  # through the library, too
        Tokenizer.train(broken(), 300)


def test_ctrl_c_is_heard_while_a_call_asks_for_nothing() -> None:
    release, pulled = threading.Event(), list[int]()

    def items() -> Iterator[int]:
        for item in range(3):
            pulled.append(item)
            yield item

    def deaf(items: Iterator[int]) -> None:
        next(items)
        os.kill(os.getpid(), signal.SIGINT)
        release.wait()
        list(items)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interruptible_call(deaf, items())
    finally:
        signal.signal(signal.SIGINT, before)
    others = [thread for thread in threading.enumerate() if thread.daemon and thread is not threading.main_thread()]
    release.set()
    for thread in others:
        thread.join(60)
    assert pulled == [0, 1], "the second is taken and dropped, and no more are asked for"
