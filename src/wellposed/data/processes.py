"""The processes that read images: forked from a server, deaf to Ctrl-C, and gone when the process they work for is.

A fork of the training process itself would start at once, but in the midst of its threads: whatever lock one of them
holds at that moment stays locked in the fork for ever. The server has no threads, and CUDA has never run in it.
"""

import os
import signal
from functools import cache
from multiprocessing import forkserver, get_context, parent_process, resource_tracker
from threading import Thread
from typing import Final

CONTEXT: Final = "forkserver"


def start_server(*modules: str) -> None:
    """Start the server, unless it runs, so that it imports what workers need while this process goes on.

    It and its forks have SIGINT and SIGTERM blocked: both may reach a whole group, and without the server nobody knows
    when the forks end.
    """
    preloaded = ["wellposed.data", "torchvision.datasets", "torchvision.transforms.v2", *modules]
    forkserver.set_forkserver_preload(preloaded)
    resource_tracker.ensure_running()  # left to the line below that starts the server, it would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # they inherit this
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@cache
def await_server() -> None:
    """Wait until the server forks. Workers asked for earlier would fail, loudly, if Ctrl-C ended this process first."""
    get_context(CONTEXT).Process(target=int).start()


def settle(worker: int) -> None:
    """What a worker does first; torch's own watch over the parent sees the server, which lives as long as workers."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the main process decides, and they end with it
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()


def end_with_parent() -> None:
    """End this process as soon as the one that asked for it does."""
    Thread(target=_await_parent, daemon=True).start()


def _await_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
