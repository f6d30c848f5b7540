"""Fitting a field: Adam on a loss, in `wellposed.training`'s loop with its checkpoints, metrics and guards."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from wellposed.fields.config import FieldConfig
from wellposed.fields.files import WEIGHTS, FieldSpec, save_field
from wellposed.fields.layers import parameter_count
from wellposed.fields.results import FieldResult, full_parameter_count
from wellposed.optim.schedules import cosine_with_warmup
from wellposed.training.guards import flushed_denormals
from wellposed.training.running import carry_out, described_place
from wellposed.training.task import Remark

_TRAINED = "trained.safetensors"


class Steps:
    """What the loop takes for its data: `count` steps between two tests, each of which draws its own points."""

    def __init__(self, count: int, batch_size: int, unit: str) -> None:
        self.count, self.batch_size, self.unit = count, batch_size, unit
        self.done = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[None, None]]:
        while self.done < self.count:
            self.done += 1
            yield None, None
        self.done = 0


class FieldTask(ABC):
    """A field that learns; random numbers come from torch's own generators, which the loop saves.

    Image, occupancy and NeRF say what is lost in a step, and how good the field is.

    Args:
        network: on its device already.
        spec: what `wellposed.fields.load` makes the network of again.
        config: how it is fitted.
        accelerator: where.
        batch_size: points of a step, for the speed that is shown.
        unit: what a point is called: pixels, points, rays.
        warmup: steps in which the learning rate rises.
        extra_state: what else the next step depends on, such as an occupancy grid: written into checkpoints and, when
            the run goes on, filled in place.
    """

    last_good: int | None = None
    is_repeatable = True

    def __init__(
        self,
        network: nn.Module,
        spec: FieldSpec,
        config: FieldConfig,
        accelerator: Accelerator,
        *,
        batch_size: int,
        unit: str,
        warmup: int = 0,
        extra_state: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.model, self.spec, self.bf16 = network, spec, config.bf16
        self.loader: Any = Steps(config.steps_per_test, batch_size, unit)
        self.device, self._config, self._warmup = accelerator.device, config, warmup
        self._extra = dict(extra_state or {})
        self._optimizer = torch.optim.Adam(network.parameters(), lr=config.lr, fused=accelerator.device.type == "cuda")

    @abstractmethod
    def loss(self, step: int) -> dict[str, Tensor]:
        """What is lost in a step on points that are drawn here, and what else to show, unread; called in autocast."""

    @abstractmethod
    def scores(self) -> dict[str, float]:
        """How good the field is on all of the data; called in eval mode, within autocast, without gradients."""

    def train_step(self, images: Any, targets: Any, step: int) -> dict[str, Tensor]:
        """One step of the optimizer, on points that the loss draws."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self._optimizer.zero_grad()
        with self.autocast():
            values = self.loss(step)
        values["loss"].backward()
        self._optimizer.step()
        return {name: value.detach() for name, value in values.items()}

    def autocast(self) -> torch.autocast:
        """bfloat16 where the configuration says so."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def learning_rate(self, step: int) -> float:
        steps = self._config.epochs * len(self.loader)
        return self._config.lr * cosine_with_warmup(step, steps=steps, warmup=self._warmup)

    def judge(self, step: int, values: dict[str, float]) -> Remark | None:
        """Nothing to remark: numbers that are not finite, the loop sees itself."""
        return None

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The scores on all of the data."""
        self.model.eval()
        with self.autocast():
            scores = self.scores()
        self.model.train()
        return scores

    def observed(self, look: Callable[[nn.Module], dict[str, Any]]) -> dict[str, Any]:
        """What `look` sees of the network, in eval mode."""
        seen = look(self.model.eval())
        self.model.train()
        return seen

    def save_weights(self, folder: Path) -> None:
        save_file(self.model.state_dict(), folder / _TRAINED)

    def save_tested(self, folder: Path) -> None:
        """The file that `wellposed.fields.load` reads."""
        save_field(self.model, folder / WEIGHTS, self.spec, half=self._config.half)

    def load_weights(self, folder: Path) -> None:
        self.model.load_state_dict(load_file(folder / _TRAINED))

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, and what the task was given to keep."""
        return {"optimizer": self._optimizer.state_dict(), "done": self.loader.done, "extra": self._extra}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._optimizer.load_state_dict(state["optimizer"])
        self.loader.done = state["done"]
        for name, kept in self._extra.items():
            kept.copy_(state["extra"][name])


AnyTask = TypeVar("AnyTask", bound=FieldTask)


class _Fitted:
    """What the loop must know of the data: a name and a size, which do not change when a run goes on."""

    def __init__(self, config: FieldConfig, size: int) -> None:
        self.name, self._size = Path(config.data).name, size

    def __len__(self) -> int:
        return self._size


def fit_field(
    config: FieldConfig,
    make_task: Callable[[Accelerator], AnyTask],
    *,
    size: int,
    note: str = "",
    quiet: bool = False,
) -> tuple[AnyTask, FieldResult]:
    """Fit as `config` says, or go on with the run in its folder if it says `resume`.

    The folder of the run holds config.json, metrics.jsonl, tensorboard/, checkpoints/ and, at the end, result.json and
    field.safetensors. A run that was killed resumes to the same bits. Ctrl-C finishes the step, writes a checkpoint and
    raises KeyboardInterrupt.

    Args:
        config: what `FieldConfig.begun` gave.
        make_task: called once all random numbers come from the seed.
        size: of the data: pixels, triangles, views; a run goes on only with as many.
        note: what to say at the end beside the result.
        quiet: show nothing while fitting.
    """

    def describe(task: AnyTask, accelerator: Accelerator) -> str:
        count, whole = parameter_count(task.model), full_parameter_count(task.model)
        share = "" if count == whole else f" ({count / whole:.1%} of full rank)"
        return (
            f"{config.data}: {config.label}, {count:,} parameters{share}; {described_place(config, task, accelerator)}"
        )

    with flushed_denormals():
        task, loop, display = carry_out(config, _Fitted(config, size), make_task, describe, quiet=quiet)
    result = FieldResult.of_run(config, task.model, loop.results, loop.seconds)
    display.say(f"{result}{note}; after {result.seconds:.0f} s, in {result.out}")
    return task, result
