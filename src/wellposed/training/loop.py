"""The loop that every training shares: steps, metrics, checkpoints, and what happens when something goes wrong."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from wellposed.errors import DivergedError, RunError
from wellposed.runs import Checkpoints, Journal, step_of, writing_to
from wellposed.training.display import Display
from wellposed.training.guards import FirstFailure, Interrupts
from wellposed.training.task import Remark, Task

_STATE = "state.pt"


class Loop:
    """Trains `task` for `epochs` epochs in the run folder `out`."""

    def __init__(
        self,
        task: Task,
        out: Path,
        accelerator: Accelerator,
        display: Display,
        *,
        epochs: int,
        log_every: int,
        checkpoint_minutes: float,
        keep_every: int = 0,
        identity: dict[str, Any],
        observe: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self.task, self.out, self.accelerator, self.display = task, out, accelerator, display
        self.epochs, self.log_every, self.checkpoint_seconds = epochs, log_every, 60 * checkpoint_minutes
        self.checkpoints, self._observe = Checkpoints(out / "checkpoints"), observe
        self.kept, self.keep_every = Checkpoints(out / "kept", keep=None), keep_every
        self.step, self.seconds, self.results = 0, 0.0, dict[str, float]()
        self._pending: list[dict[str, Tensor]] = []
        self._identity = {**identity, "device": accelerator.device.type}
        self._journal: Journal | None = None
        self._is_resumed = False
        self._journal_length = 0
        self._mark = self._saved = time.perf_counter()

    @property
    def epoch(self) -> int:
        """Whole epochs that are done."""
        return self.step // len(self.task.loader)

    def resume(self) -> None:
        """Go on from the newest whole checkpoint of the run, or begin where it never got to write one."""
        if not self.checkpoints.all():
            self.display.say(f"there is no checkpoint in {self.out} yet: beginning with the first step")
            return
        path, complaints = self.checkpoints.newest()
        for complaint in complaints:
            self.display.say(f"{complaint}; using {path.name} instead")
        self._load(path)
        self._is_resumed = True
        self.display.say(f"going on after step {self.step} (epoch {self.epoch})")

    def run(self) -> dict[str, float]:
        """Train to the end and return the last evaluation."""
        steps = self.epochs * len(self.task.loader)
        with Interrupts() as interrupts, self._journal_open(), self.display.progress(steps, self.step):
            self._mark = self._saved = time.perf_counter()
            if not self._is_resumed:
                self._look()
                self._keep()
                self._checkpoint()
            while self.step < steps:
                for images, targets in self.task.loader:
                    self._pending.append(self.task.train_step(images, targets, self.step))
                    self.step += 1
                    at_end = self.step % len(self.task.loader) == 0
                    if self.step % self.log_every == 0 or at_end:
                        self._log()
                    if at_end:
                        self._evaluate()
                        self._keep()
                    late = time.perf_counter() - self._saved > self.checkpoint_seconds
                    stop, save = self._agreed(interrupts.requested, late)
                    if at_end or stop or save:
                        self._checkpoint()
                    if stop and self.step < steps:
                        self.display.say(f"stopped after step {self.step}; go on with --resume --out {self.out}")
                        raise KeyboardInterrupt
        return self.results

    def _log(self) -> None:
        """Report the mean of the numbers since the last time."""
        table = self._read()
        values = dict(zip(self._pending[0], table.mean(0).tolist(), strict=True))
        speed = {f"{self.task.loader.unit}_per_second": len(table) * self.task.loader.batch_size / self._lap()}
        self._pending = []
        self._report("train", **values, lr=self.task.learning_rate(self.step - 1), **speed)
        self.display.advance(self.step, self.step / len(self.task.loader), values | speed)
        self._heed(self.task.judge(self.step, values))

    def _heed(self, remark: Remark | None) -> None:
        """Pass on what the task says; while it has doubts the last good checkpoint stays, and a lost run ends."""
        self.checkpoints.spared = self.task.last_good
        if remark is None:
            return
        self._report("remark", text=remark.text, lost=remark.lost)
        if not remark.lost:
            self.display.say(f"warning, after step {self.step}: {remark.text}")
            return
        good = self.checkpoints.before(self.task.last_good)
        kept = f"{good} is the last checkpoint from before" if good else "There is no checkpoint from before"
        raise DivergedError(f"stopped after step {self.step}: {remark.text}. {kept}")

    def _evaluate(self) -> None:
        self.display.testing()
        self.results = self.task.evaluate()
        if not all(map(math.isfinite, self.results.values())):
            self._explain(self.step)
        self._lap()
        self._report("test", **self.results, seconds=self.seconds)
        self.display.epoch(self.epoch, self.epochs, self.results, self.seconds)
        self._look()

    def _look(self) -> None:
        """Write down what the caller wants to know about the model at this point; the time it takes does not count."""
        if self._observe is not None:
            start = time.perf_counter()
            self._report("observe", **self._observe())
            self._mark += time.perf_counter() - start

    def _lap(self) -> float:
        """Seconds since the last lap, which count as time of the run."""
        now = time.perf_counter()
        lap, self._mark = now - self._mark, now
        self.seconds += lap
        return lap

    def _read(self) -> Tensor:
        """The numbers of the steps since the last report, a row each, over all processes; all of them are finite."""
        rows = [torch.stack([value.float() for value in values.values()]) for values in self._pending]
        table: Tensor = self.accelerator.reduce(torch.stack(rows), "mean").double().cpu()
        finite = table.isfinite().all(1)
        if not finite.all():
            self._explain(self.step - len(table) + int(finite.int().argmin()))
        return table

    def _agreed(self, *wishes: bool) -> list[bool]:
        """What any process wishes: at once if it is alone; several ask each other where they wait anyway."""
        if self.accelerator.num_processes == 1:
            return list(wishes)
        if self._pending:
            return [False] * len(wishes)
        votes = torch.tensor(wishes, dtype=torch.float32, device=self.accelerator.device)
        return [count > 0 for count in self.accelerator.reduce(votes, "sum").tolist()]

    def _report(self, event: str, **values: Any) -> None:
        if self._journal is not None:
            with writing_to(self.out):
                self._journal.write(event, self.step, epoch=self.step / len(self.task.loader), **values)

    @contextmanager
    def _journal_open(self) -> Iterator[None]:
        if not self.accelerator.is_main_process:
            yield
            return
        with writing_to(self.out):
            journal = Journal(self.out, length=self._journal_length, step=self.step if self._is_resumed else None)
        with journal as self._journal:
            yield

    def _checkpoint(self) -> None:
        """Write everything the next step depends on, once it is known to be finite."""
        start = time.perf_counter()
        if self._pending:
            self._read()
        norms = torch.stack(torch._foreach_norm([param.detach() for param in self.task.model.parameters()]))
        if not norms.isfinite().all():
            self._explain(self.step)
        random = gather_object([self._random_state()])
        if self._journal is not None:
            state = {
                "step": self.step,
                "identity": self._identity,
                "seconds": self.seconds,
                "journal_length": self._journal.length(),
                "pending": self._pending,
                "results": self.results,
                "random": random,
                "task": self.task.state_dict(),
            }
            with writing_to(self.out), self.checkpoints.writing(self.step) as folder:
                self.task.save_weights(folder)
                torch.save(state, folder / _STATE)
        self.accelerator.wait_for_everyone()
        self._saved = time.perf_counter()
        self._mark += self._saved - start  # writing is no part of the speed that is reported

    def _keep(self) -> None:
        """Write the tested weights of every so many epochs, and of the first and the last, where they stay.

        Before the checkpoint of the same step, so that a run that is killed in between writes them again.
        """
        is_due = self.keep_every and (self.epoch % self.keep_every == 0 or self.epoch == self.epochs)
        if not is_due or self._journal is None:
            return
        start = time.perf_counter()
        with writing_to(self.out), self.kept.writing(self.step) as folder:
            self.task.save_tested(folder)
        self._mark += time.perf_counter() - start

    def _load(self, path: Path) -> None:
        state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
        for name, value in self._identity.items():
            known = state["identity"].get(name, value)  # a setting that is newer than the run has its default
            if known != value:
                raise RunError(
                    f"{path} belongs to a run with {name}={known}, not {value}: "
                    "give it the data, the settings and the kind of device it was started with"
                )
        self.task.load_weights(path)
        device = self.accelerator.device
        self.step, self.seconds, self.results = state["step"], state["seconds"], state["results"]
        self._journal_length = state["journal_length"]
        self._pending = [{name: value.to(device) for name, value in values.items()} for values in state["pending"]]
        self.task.load_state_dict(state["task"])
        self.checkpoints.spared = self.task.last_good
        if len(state["random"]) != self.accelerator.num_processes:
            self.display.say(f"the run had {len(state['random'])} processes: dropout will not repeat its numbers")
        else:
            self._set_random_state(state["random"][self.accelerator.process_index])

    def _explain(self, bad: int) -> None:
        """Raise DivergedError for step number `bad`; taking the steps up to it again finds the first layer."""
        self.display.say(f"step {bad + 1} gave a number that is not finite; looking for the layer it came from")
        path, _ = self.checkpoints.newest()
        self._load(path)
        with FirstFailure(self.task.model) as failure, torch.compiler.set_stance("force_eager"):
            while self.step <= bad:
                for images, targets in self.task.loader:
                    self.task.train_step(images, targets, self.step)
                    self.step += 1
                    if self.step > bad:
                        break
        found = [where for where in gather_object([failure.where]) if where]
        where = f"it begins with {found[0]}" if found else "taking the steps again gave finite numbers"
        epoch = (bad + 1) / len(self.task.loader)
        longer = " or a longer --warmup-epochs" if "warmup_epochs" in self._identity else ""
        raise DivergedError(
            f"the loss or its gradient is not finite at step {bad + 1} (epoch {epoch:.2f}): {where}. "
            f"{path} is the last good checkpoint, after step {step_of(path)}. "
            f"Start again in another --out with a lower --lr{longer}"
        )

    def _random_state(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self.accelerator.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.accelerator.device)
        return states

    def _set_random_state(self, states: dict[str, Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and self.accelerator.device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], self.accelerator.device)
