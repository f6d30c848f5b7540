"""What supervised training does at each step: cross-entropy on labelled images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from wellposed.data import Augment, Dataset, Loader, Mix, open_loader
from wellposed.optim import cosine_with_warmup, make_optimizer
from wellposed.recipes import describe, load, write
from wellposed.training.accelerators import compiled, use_bf16
from wellposed.training.augmentation import Augmentation
from wellposed.training.config import TrainConfig
from wellposed.training.guards import is_repeatable
from wellposed.training.models import build_model, model_arguments


class Classification:
    """Cross-entropy on labelled images; to be made and used within `guards.repeatable`."""

    last_good: int | None = None

    def __init__(self, config: TrainConfig, data: Dataset, test: Dataset, accelerator: Accelerator) -> None:
        self._config, self._accelerator = config, accelerator
        self.loader, self._test = self._loaders(data, test)
        self.model, arguments = self._new_model(data)
        self.header = describe(self.model, arguments)
        self.model.to(accelerator.device)
        self.bf16 = use_bf16(config.precision, accelerator.device)
        with self._autocast():
            self.is_repeatable = is_repeatable(self.model, self._example(data).to(accelerator.device))
        average = get_ema_multi_avg_fn(config.ema)
        self._ema = AveragedModel(self.model, multi_avg_fn=average, use_buffers=True) if config.ema else None
        forward = accelerator.prepare_model(self.model)
        self._forward = compiled(forward, accelerator) if config.compile else forward
        self._optimizer = make_optimizer(
            *(config.optimizer, self.model),
            lr=config.lr,
            weight_decay=config.weight_decay,
            betas=config.betas,
            precondition_frequency=config.precondition_frequency,
            max_precond_dim=config.max_precond_dim,
            tf32=config.soap_tf32,
            spread_refresh=config.soap_spread,
        )
        self._steps = config.epochs * len(self.loader)
        self._warmup = min(self._steps - 1, round(config.warmup_epochs * len(self.loader)))

    def _loaders(self, data: Dataset, test: Dataset) -> tuple[Loader, Loader]:
        """Batches to train on and to test on."""
        config, place = self._config, self._place()
        loader = open_loader(
            data,
            config.batch_size,
            **place,
            seed=config.seed,
            **augmenting(config, data),
            workers=config.workers,
            compile=config.compile,
        )
        return loader, open_loader(
            *(test, config.batch_size),
            **place,
            shuffle=False,
            mean=loader.mean,
            std=loader.std,
            workers=config.workers,
        )

    def _place(self) -> dict[str, Any]:
        """Which part of every batch is made here, and where."""
        here = self._accelerator
        return {"device": here.device, "rank": here.process_index, "ranks": here.num_processes}

    def _new_model(self, data: Dataset) -> tuple[nn.Module, dict[str, Any] | None]:
        """The model, and the arguments that it was made with."""
        return build_model(self._config, data), model_arguments(self._config, data)

    def _example(self, data: Dataset) -> Tensor:
        """A batch of what the model takes, whatever is in it."""
        return torch.zeros(2, *data.image_shape)

    def _logits(self, model: Callable[..., Any], inputs: Tensor) -> Tensor:
        """Of every class, (B, classes), or (B, classes, L) where each place of an input has a target."""
        return model(inputs)

    def train_step(self, images: Tensor, targets: Tensor, step: int) -> dict[str, Tensor]:
        """One step of the optimizer."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self._optimizer.zero_grad()
        with self._autocast():
            logits = self._logits(self._forward, images)
        loss = cross_entropy(logits, targets, label_smoothing=self._config.label_smoothing)
        self._accelerator.backward(loss)
        reported = {"loss": loss.detach()}
        if self._config.clip:
            params = list(self.model.parameters())
            reported["grad_norm"] = nn.utils.clip_grad_norm_(params, self._config.clip, foreach=True)
        self._optimizer.step()
        if self._ema is not None:
            self._ema.update_parameters(self.model)
        return reported

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._accelerator.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def learning_rate(self, step: int) -> float:
        assert self._config.lr is not None
        return self._config.lr * cosine_with_warmup(step, steps=self._steps, warmup=self._warmup)

    def judge(self, step: int, values: dict[str, float]) -> None:
        """Nothing: numbers that are not finite, the loop sees itself."""

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on the test set, of the averaged weights where there are any."""
        model = self.tested_model().eval()
        if self._accelerator.num_processes > 1:  # BatchNorm's: what is tested is what the first process saves
            for buffer in [*self.model.buffers(), *model.buffers()]:
                torch.distributed.broadcast(buffer, 0)
        sums = torch.zeros(3, dtype=torch.float64, device=self._accelerator.device)
        for images, labels in self._test:
            with self._autocast():
                logits = self._logits(model, images)
            loss = cross_entropy(logits, labels, reduction="sum")
            right = (logits.argmax(1) == labels).sum()
            sums += torch.stack([loss, right, torch.tensor(labels.numel(), device=loss.device)])
        self.model.train()
        loss, right, count = self._accelerator.reduce(sums, "sum").tolist()
        return {"loss": loss / count, "accuracy": right / count}

    def tested_model(self) -> nn.Module:
        """The model whose accuracy counts: that of the averaged weights where there are any."""
        return self.model if self._ema is None else self._ema.module

    def observed(self, look: Callable[[nn.Module], dict[str, Any]]) -> dict[str, Any]:
        """What `look` sees of the tested model, in eval mode."""
        seen = look(self.tested_model().eval())
        self.model.train()
        return seen

    def save_weights(self, folder: Path) -> None:
        write(self.model, folder, self.header)

    def save_tested(self, folder: Path) -> None:
        write(self.tested_model(), folder, self.header)

    def load_weights(self, folder: Path) -> None:
        load(folder, self.model)

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, the loader and the average."""
        average = None if self._ema is None else self._ema.state_dict()
        return {"optimizer": self._optimizer.state_dict(), "loader": self.loader.state_dict(), "average": average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        if self._ema is not None:
            self._ema.load_state_dict(state["average"])


def augmenting(config: Augmentation, data: Dataset) -> dict[str, Any]:
    """What a loader of `data` to train on is told of `config`."""
    augment = Augment(
        crop=config.crop or "none",
        padding=max(1, data.image_shape[-1] // 8),
        flip=bool(config.flip),
        geometry=config.geometry,
        colour=config.colour,
        erase=config.erase,
    )
    return {"augment": augment, "mix": Mix(config.mixup, config.cutmix) if config.mixup or config.cutmix else None}


def cross_entropy(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """In float32, of logits (B, classes), or (B, classes, L) where each place has a target.

    Places are taken as samples: for a third dimension, torch has no kernel that is repeatable on a GPU.
    """
    if logits.ndim == 3:
        logits, targets = logits.mT.flatten(0, 1), targets.flatten()
    return F.cross_entropy(logits.float(), targets, **options)
