"""Interrupts: an impatient second Ctrl-C must not leave a VM half restored. [I/O]"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_interrupts(notify: Callable[[str], None]) -> Iterator[None]:
    """The first of them inside is answered with words; the next one raises KeyboardInterrupt.

    What nohup ignores stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    stated = False

    def answer(number: int, frame: object) -> None:
        nonlocal stated
        if stated:
            raise KeyboardInterrupt
        stated = True
        notify("the VM is being restored; once more leaves it as it is, for homenode trial undo")

    before = {
        one: signal.signal(one, answer)
        for one in _HELD
        if signal.getsignal(one) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
