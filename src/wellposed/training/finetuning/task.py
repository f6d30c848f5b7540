"""What fine-tuning does at each step, whatever is learned: AdamW on what is trained, under a warm-up and a cosine."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from wellposed.data import Loader
from wellposed.optim import cosine_with_warmup, make_optimizer
from wellposed.runs import provenance
from wellposed.training.accelerators import use_bf16
from wellposed.training.finetuning.config import FinetuneConfig
from wellposed.training.finetuning.methods import compile_blocks, rounding_layers, update_numbers
from wellposed.training.guards import is_repeatable

_WEIGHTS = "trained.safetensors"


class FinetuneTask(ABC):
    """A model that is already there and learns on; to be made and used within `guards.repeatable`.

    A kind of data makes the model, in `base_dtype` and on the device, and its batches, and then calls `_begin`.
    """

    last_good: int | None = None
    model: Any
    loader: Loader

    def __init__(self, config: FinetuneConfig, accelerator: Accelerator) -> None:
        self._settings, self._accelerator = config, accelerator
        self.bf16 = use_bf16(config.precision, accelerator.device)
        self.base_dtype = torch.bfloat16 if self.bf16 and config.method != "full" else torch.float32
        self._rounding: list[Any] = []
        self._taken = 0
        self._results: dict[str, float] = {}

    def _begin(self, example: Tensor) -> None:
        """Make ready to train `model` on `loader`, whose inputs look like `example`."""
        config, net = self._settings, self._net()
        with self._autocast():
            self.is_repeatable = is_repeatable(net, example.to(self._accelerator.device))
        self._training()
        if config.compile:
            compile_blocks(self.model)
        self._rounding = rounding_layers(self.model) if self.bf16 else []
        self._learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._forward = self._accelerator.prepare_model(net)
        self._optimizer = make_optimizer(
            "adamw", self.model, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas
        )
        self._steps = config.epochs * len(self.loader)
        self._warmup = min(self._steps - 1, round(config.warmup_epochs * len(self.loader)))

    @abstractmethod
    def _net(self) -> nn.Module:
        """From a batch of inputs to logits."""

    @abstractmethod
    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum of -log p of the targets."""

    @abstractmethod
    def _counted(self, targets: Tensor) -> Tensor:
        """How many targets there are."""

    @abstractmethod
    def _tested(self) -> dict[str, float]:
        """The scores of the model, which is in eval mode."""

    @abstractmethod
    def _save_model(self, folder: Path) -> None:
        """Write the model whose weights are all trained into `folder`."""

    @abstractmethod
    def _card(self, facts: dict[str, Any]) -> str:
        """The card of what was trained."""

    def train_step(self, images: Tensor, targets: Tensor, step: int) -> dict[str, Tensor]:
        """One step of the optimizer; all targets of all processes weigh the same."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self._optimizer.zero_grad()
        total = self._accelerator.reduce(self._counted(targets).float(), "mean")
        size = self._settings.micro_batch or len(images)
        sums = torch.zeros((), device=images.device)
        for inputs, wanted in zip(images.split(size), targets.split(size), strict=True):
            loss = self._loss(inputs, wanted) / total
            self._accelerator.backward(loss)
            sums += loss.detach()
        reported = {"loss": sums}
        if self._settings.clip:
            reported["grad_norm"] = nn.utils.clip_grad_norm_(self._learning, self._settings.clip, foreach=True)
        self._optimizer.step()
        self._taken = step + 1
        return reported

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of -log p of the targets, from which the gradient is taken."""
        with self._autocast():
            logits = self._forward(inputs)
        return self._losses(logits, targets)

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        """bf16, if it is asked for; PEFT then leaves inputs as they are, which autocast would only round again."""
        for layer in self._rounding:
            layer.cast_input_dtype_enabled = False
        try:
            with torch.autocast(self._accelerator.device.type, dtype=torch.bfloat16, enabled=self.bf16):
                yield
        finally:
            for layer in self._rounding:
                layer.cast_input_dtype_enabled = True

    def _training(self) -> None:
        """Train mode, but for statistics of batches that an adapter does not keep."""
        self.model.train()
        if self._settings.method != "full":
            for module in self.model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()

    def learning_rate(self, step: int) -> float:
        assert self._settings.lr is not None
        return self._settings.lr * cosine_with_warmup(step, steps=self._steps, warmup=self._warmup)

    def judge(self, step: int, values: dict[str, float]) -> None:
        """Nothing: numbers that are not finite, the loop sees itself."""
        return

    @property
    def is_last(self) -> bool:
        """Whether all steps have been taken."""
        return self._taken == self._steps

    def evaluate(self) -> dict[str, float]:
        """The scores on what there is to test on; none after an epoch that is not to be tested."""
        epoch = self._taken // len(self.loader)
        if epoch % self._settings.test_every and not self.is_last:
            return {}
        self.model.eval()
        with torch.compiler.set_stance("force_eager"):  # of tests each batch has another shape
            self._results = self._tested()
        self._training()
        return self._results

    def observed(self, look: Callable[[nn.Module], dict[str, Any]]) -> dict[str, Any]:
        """What `look` sees of the model, in eval mode."""
        with torch.compiler.set_stance("force_eager"):
            seen = look(self.model.eval())
        self._training()
        return seen

    def parameter_counts(self) -> tuple[int, int]:
        """How many numbers are trained, and how many there are."""
        counts = [(parameter.numel(), parameter.requires_grad) for parameter in self.model.parameters()]
        return sum(count for count, trained in counts if trained), sum(count for count, _ in counts)

    @property
    def facts(self) -> dict[str, Any]:
        """What else is to be known about the run: its size, and the rank of what was learned."""
        trained, whole = self.parameter_counts()
        facts = {"trained_parameters": trained, "all_parameters": whole}
        return facts if self._settings.method == "full" else facts | update_numbers(self.model)

    def _trained(self) -> dict[str, Tensor]:
        """What changes: parameters and, where all of them are trained, the buffers that go with them."""
        found = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        if self._settings.method == "full":
            kept = self.model.state_dict().keys()
            found |= {name: value for name, value in self.model.named_buffers() if name in kept}
        return found

    def save_weights(self, folder: Path) -> None:
        save_file({name: value.detach().contiguous() for name, value in self._trained().items()}, folder / _WEIGHTS)

    @torch.no_grad()
    def load_weights(self, folder: Path) -> None:
        found = load_file(folder / _WEIGHTS)
        for name, value in self._trained().items():
            value.copy_(found[name])

    def save_tested(self, folder: Path) -> None:
        """The adapter as PEFT saves it, or the model, with its card, in a folder within `folder`."""
        is_full = self._settings.method == "full"
        target = folder / ("model" if is_full else "adapter")
        written = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(written, ignore_errors=True)
        if is_full:
            self._save_model(written)
        else:
            self.model.save_pretrained(str(written), save_embedding_layers=False)
        facts = self.facts | provenance(self._accelerator.device, seed=self._settings.seed)
        (written / "README.md").write_text(self._card(facts), encoding="utf-8")
        self._save_more(written)
        shutil.rmtree(target, ignore_errors=True)
        written.replace(target)

    def _save_more(self, folder: Path) -> None:
        """Write what else belongs to the model into `folder`."""
        return

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer and the loader, and the last scores."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "loader": self.loader.state_dict(),
            "taken": self._taken,
            "results": self._results,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        self._taken, self._results = state["taken"], state["results"]
