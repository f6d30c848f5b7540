"""Runs side by side, in processes of their own, with one bar each."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from wellposed.data.processes import CONTEXT, end_with_parent, start_server
from wellposed.errors import DivergedError, RunError, WellposedError
from wellposed.runs import read_journal
from wellposed.training.settings import Settings


class Ended(Protocol):
    """How a run ended; as a string, what is to be shown of it."""

    @property
    def seconds(self) -> float:
        """That it took."""
        ...


class LostError(RunError):
    """A run ended in a way that nobody foresaw."""


Key = TypeVar("Key", bound=Hashable)
Outcome = TypeVar("Outcome", bound=Ended)


def run_side_by_side(
    runs: Mapping[Key, Any],
    work: Callable[[Any, Key], Outcome],
    finished: Callable[[Any, Key], Outcome | None],
    *,
    jobs: int,
    preload: Sequence[str],
) -> dict[Key, Outcome]:
    """How every run ended: those that are done already as they are, the others after `work` on them.

    On Ctrl-C or SIGTERM every run writes a checkpoint first. A WellposedError of one ends all of them likewise; but one
    that diverges or breaks off says little about the others: they go on, and it is raised in the end.

    Args:
        runs: the settings of each run, under a key that names it.
        work: called with both in a process of its own; a function of a module.
        finished: how a run ended that needs no more work, else None.
        jobs: how many at a time.
        preload: modules that each of them needs.
    """
    outcomes = {key: done for key, config in runs.items() if (done := finished(config, key))}
    console = Console(stderr=True, highlight=False)
    if outcomes:
        console.print(f"{len(outcomes)} of {len(runs)} runs are done already")
    with _bars(console) as progress:
        bars = {key: progress.add_task(str(key), total=1.0, numbers="", start=False) for key in runs}
        for key, outcome in outcomes.items():
            progress.update(bars[key], completed=1.0, numbers=str(outcome))
        waiting = {key: config for key, config in runs.items() if key not in outcomes}
        lost: list[WellposedError] = []
        for key, ended in _worked_on(waiting, work, jobs, preload, progress, bars):
            if isinstance(ended, WellposedError):
                lost.append(ended)
                progress.update(bars[key], numbers="lost")
                console.print(f"{key}: {ended}", style="red")
                continue
            outcome = outcomes[key] = ended
            progress.update(bars[key], completed=1.0, numbers=str(outcome))
            if not console.is_terminal:
                console.print(f"{key}: {outcome} ({outcome.seconds:.0f} s)")
    if lost:
        raise lost[0]
    return {key: outcomes[key] for key in runs}


def _worked_on(
    waiting: dict[Key, Any],
    work: Callable[[Any, Key], Outcome],
    jobs: int,
    preload: Sequence[str],
    progress: Progress,
    bars: dict[Key, Any],
) -> Iterator[tuple[Key, Outcome | WellposedError]]:
    """Each outcome as soon as it is there, or why there is none."""
    queue, running = list(waiting), dict[Key, tuple[ForkServerProcess, Connection]]()
    with _sigterm_as_interrupt():
        try:
            while queue or running:
                while queue and len(running) < jobs:
                    key = queue.pop(0)
                    running[key] = _start(waiting[key], key, work, preload)
                    progress.start_task(bars[key])
                for key, (process, results) in list(running.items()):
                    if results.poll() or not process.is_alive():
                        outcome = _received(process, results, waiting[key])
                        del running[key]
                        yield key, outcome
                    elif not progress.disable:
                        progress.update(bars[key], **_progress_of(waiting[key].folder, waiting[key].epochs))
                time.sleep(0.1)
        except KeyboardInterrupt:
            progress.console.print("stopping: every run writes a checkpoint; the same command goes on with them")
            raise
        finally:
            for process, _ in running.values():
                process.terminate()  # which a run that trains takes as a wish to stop after its step
            for process, _ in running.values():
                process.join()


def _start(
    config: Any, key: Key, work: Callable[[Any, Key], Outcome], preload: Sequence[str]
) -> tuple[ForkServerProcess, Connection]:
    start_server(*preload)
    context = get_context(CONTEXT)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(config, key, work, sender), daemon=False)
    process.start()
    sender.close()
    return process, receiver


def _received(process: ForkServerProcess, results: Connection, config: Settings) -> Any:
    try:
        result = results.recv()
    except EOFError:
        process.join()
        return LostError(
            f"the run in {config.folder} ended with status {process.exitcode} and no word (out of memory? logs/ beside "
            "its folder may tell); the same command goes on with it, fewer --jobs need less"
        )
    process.join()
    if isinstance(result, WellposedError) and not isinstance(result, DivergedError | LostError):
        raise result
    return result


def _work(config: Settings, key: Key, work: Callable[[Any, Key], Outcome], results: Connection) -> None:
    """What a process does: one run. The main process alone passes the wish to stop on: SIGINT stays blocked here, and a
    SIGTERM for all of its group, as timeout sends it, would be the second one, which means at once.
    """
    end_with_parent()
    os.setpgrp()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    torch.set_num_threads(1)  # so that a run's numbers do not depend on how many there are beside it
    log = config.folder.parents[1] / "logs" / f"{key}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as sys.stderr:
        os.dup2(sys.stderr.fileno(), 2)  # for libraries that took hold of it before
        try:
            results.send(work(config, key))
        except WellposedError as error:
            results.send(error)
        except KeyboardInterrupt:
            os._exit(130)
        except Exception as error:
            traceback.print_exc()  # into the log
            told = f"{type(error).__name__}: {str(error)[:200]}"
            results.send(LostError(f"{key} ended with {told}; {log} says where. The same command goes on with it"))


def _progress_of(out: Path, epochs: int) -> dict[str, Any]:
    try:
        events = read_journal(out, "train")
    except (OSError, ValueError):  # not there yet, or a line is being written
        events = []
    if not events:
        return {"numbers": "starting"}
    return {"completed": events[-1]["epoch"] / epochs, "numbers": f"loss {events[-1]['loss']:.3f}"}


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _bars(console: Console) -> Progress:
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[numbers]}")]
    return Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
