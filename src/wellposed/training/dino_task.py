"""What pretraining by DINO does at each step: a student learns to say of a view what its own average says of another.

Shapes: N images, G global views and L local ones of each, K outputs.
"""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from wellposed.data import Dataset, open_loader
from wellposed.data.crops import MultiCrop
from wellposed.optim import make_optimizer
from wellposed.recipes import describe, load, write
from wellposed.training.accelerators import compiled, use_bf16
from wellposed.training.dino_config import DinoConfig
from wellposed.training.dino_loss import dino_loss, information, spread
from wellposed.training.dino_models import backbone_arguments, shown_size
from wellposed.training.dino_neighbours import Neighbours
from wellposed.training.dino_network import Head, Network
from wellposed.training.dino_schedules import cosine, line, warmed_up
from wellposed.training.dino_watch import Watch
from wellposed.training.guards import is_repeatable
from wellposed.training.models import changed_model
from wellposed.training.task import Remark

REST = "dino.safetensors"
"""In a checkpoint, beside the teacher's backbone: the student and both heads."""


class Dino:
    """Student and teacher; to be made and used within `guards.repeatable`.

    Args:
        config: with everything filled in, as `dino_models.resolved` does.
        data: the training set.
        test: what k-NN classifies after every epoch; nothing if None.
        accelerator: where it takes place.
    """

    def __init__(self, config: DinoConfig, data: Dataset, test: Dataset | None, accelerator: Accelerator) -> None:
        self._config, self._accelerator = config, accelerator
        device = accelerator.device
        crops = crops_of(config)
        self.loader = open_loader(
            *(data, config.batch_size),
            device=device,
            seed=config.seed,
            rank=accelerator.process_index,
            ranks=accelerator.num_processes,
            workers=config.workers,
            columns=crops.columns,
        )
        self._views = torch.compile(crops) if config.compile else crops
        arguments = backbone_arguments(config, data)
        backbone: Any = changed_model(config, arguments)
        self.header = describe(backbone, arguments)
        head = Head(backbone.num_features, config.hidden_dim, config.bottleneck_dim, config.out_dim)
        self.model = Network(backbone, head)
        self._shown_size = shown_size(config, data)
        for size in (config.local_size, self._shown_size):
            assert size is not None
            self.model.expect(size, size)
        self.model.to(device)
        self.bf16 = use_bf16(config.precision, device)
        with self._autocast():
            self.is_repeatable = is_repeatable(self.model, *self._nothing(data.image_shape[0]))
        self._teacher = deepcopy(self.model).requires_grad_(False).eval()
        forward = accelerator.prepare_model(self.model)
        self._forward = compiled(forward, accelerator) if config.compile else forward
        self._teach = compiled(self._teacher, accelerator) if config.compile else self._teacher
        self._loss = torch.compile(dino_loss) if config.compile else dino_loss
        self._center_K = torch.zeros(config.out_dim, device=device)
        self._optimizer = make_optimizer(
            *(config.optimizer, self.model),
            lr=config.lr,
            weight_decay=1.0,  # of the groups that are decayed; how much, each step says
            betas=config.betas,
            precondition_frequency=config.precondition_frequency,
            max_precond_dim=config.max_precond_dim,
            tf32=config.soap_tf32,
            spread_refresh=config.soap_spread,
        )
        self._decayed = [number for number, group in enumerate(self._optimizer.param_groups) if group["weight_decay"]]
        self._steps = config.epochs * len(self.loader)
        self._warmup = min(self._steps - 1, round(config.warmup_epochs * len(self.loader)))
        self._watch = Watch(self._steps, config.momentum, stops=config.collapse == "stop")
        self._neighbours = None
        if test is not None:
            self._neighbours = Neighbours(
                *(data, test, config.knn_images, config.batch_size, accelerator, self.loader, config.workers)
            )

    def train_step(self, images: Tensor, targets: Tensor, step: int) -> dict[str, Tensor]:
        """One step of the student, then of the teacher; `targets` are the random numbers of the views."""
        config = self._config
        if config.compile:
            torch.compiler.cudagraph_mark_step_begin()
        views = [(made - self.loader.mean) / self.loader.std for made in self._views(images, targets)]
        views = views if config.local_crops else views[:1]
        self._schedule(step)
        self._optimizer.zero_grad()
        with self._autocast():
            with torch.no_grad():
                teacher_NGK, features_NGD = self._teach(views[0])
            student_NVK, _ = self._forward(*views)
        temperature = line(
            *(step, config.teacher_temp_epochs * len(self.loader), config.teacher_temp_start, config.teacher_temp)
        )
        found = self._loss(
            *(student_NVK, teacher_NGK, self._center_K),
            student_temp=config.student_temp,
            teacher_temp=torch.full((), temperature, device=images.device),
        )
        self._accelerator.backward(found.loss)
        if step < config.freeze_last_epochs * len(self.loader):
            self.model.head.last_layer.weight_v.grad = None
        norm = clip_each_([param.grad for param in self.model.parameters() if param.grad is not None], config.clip)
        self._optimizer.step()
        means_2K = torch.stack([found.output_mean_K, found.probability_mean_K])
        output_mean_K, probability_mean_K = self._accelerator.reduce(means_2K, "mean")
        self._center_K.lerp_(output_mean_K, 1 - config.center_momentum)
        self._follow(cosine(step, self._steps, config.momentum, 1.0))
        std, rank = spread(features_NGD.flatten(0, 1))
        mean_entropy = found.entropy * torch.full((), config.out_dim, device=images.device).log()
        return {
            "loss": found.loss.detach(),
            "kl": found.kl,
            "entropy": found.entropy,
            "information": information(probability_mean_K, mean_entropy),
            "std": std,
            "rank": rank,
            "grad_norm": norm,
        }

    def learning_rate(self, step: int) -> float:
        assert self._config.lr is not None
        highest = self._config.lr * self._config.batch_size / 256
        return warmed_up(step, self._steps, self._warmup, highest, min(highest, self._config.final_lr))

    def judge(self, step: int, values: dict[str, float]) -> Remark | None:
        """Whether the run collapses."""
        return self._watch.judge(step, values)

    @property
    def last_good(self) -> int | None:
        """The step after which the signs of a collapse began that are there now."""
        return self._watch.since

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """k-NN accuracy of the teacher's features and their spread, where there is a test set."""
        if self._neighbours is None:
            return {}
        with self._autocast():
            return self._neighbours.evaluate(self._teacher, self._shown_size)

    def tested_model(self) -> nn.Module:
        """The teacher's backbone."""
        return self._teacher.backbone

    def observed(self, look: Callable[[nn.Module], dict[str, Any]]) -> dict[str, Any]:
        """What `look` sees of the teacher's backbone, which takes images of any size."""
        with self._teacher.backbone_of_any_size() as backbone:
            return look(backbone)

    def networks(self) -> tuple[Network, Network]:
        """Student and teacher."""
        return self.model, self._teacher

    def save_weights(self, folder: Path) -> None:
        """Write both networks; `folder` can be loaded as the teacher's backbone."""
        self.save_tested(folder)
        rest = {f"student.{name}": tensor for name, tensor in self.model.state_dict().items()}
        rest |= {f"teacher.head.{name}": tensor for name, tensor in self._teacher.head.state_dict().items()}
        save_file({name: tensor.contiguous() for name, tensor in rest.items()}, folder / REST)

    def save_tested(self, folder: Path) -> None:
        write(self.tested_model(), folder, self.header)

    def load_weights(self, folder: Path) -> None:
        load(folder, self._teacher.backbone)
        rest = load_file(folder / REST)
        for prefix, module in (("student.", self.model), ("teacher.head.", self._teacher.head)):
            module.load_state_dict({name.removeprefix(prefix): rest[name] for name in rest if name.startswith(prefix)})

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, the loader, the centre and the watch."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "loader": self.loader.state_dict(),
            "center": self._center_K,
            "watch": self._watch.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        self._center_K.copy_(state["center"])
        self._watch.load_state_dict(state["watch"])

    def _schedule(self, step: int) -> None:
        decay = cosine(step, self._steps, self._config.weight_decay, self._config.weight_decay_end)
        for number, group in enumerate(self._optimizer.param_groups):
            group["lr"] = self.learning_rate(step)
            group["weight_decay"] = decay if number in self._decayed else 0.0

    @torch.no_grad()
    def _follow(self, momentum: float) -> None:
        """The teacher moves towards the student."""
        torch._foreach_lerp_(list(self._teacher.parameters()), list(self.model.parameters()), 1 - momentum)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._accelerator.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def _nothing(self, channels: int) -> list[Tensor]:
        """Views of two black images."""
        config = self._config
        sizes = [config.global_size, config.local_size] if config.local_crops else [config.global_size]
        return [torch.zeros(2, 1, channels, size, size, device=self._accelerator.device) for size in sizes if size]


def clip_each_(gradients: list[Tensor], most: float) -> Tensor:
    """Scale every gradient whose norm is above `most` down to it, by itself; 0 leaves them. The norm of them all."""
    norms = torch.stack(torch._foreach_norm(gradients))
    if most:
        factors = (most / (norms + 1e-6)).clamp(max=1)
        torch._foreach_mul_(gradients, list(factors.unbind()))
    return torch.linalg.vector_norm(norms)


def crops_of(config: DinoConfig) -> MultiCrop:
    """The views of a run whose configuration has everything filled in."""
    assert config.global_size is not None
    assert config.local_size is not None
    assert config.blur is not None
    return MultiCrop(
        global_size=config.global_size,
        local_size=config.local_size,
        global_crops=config.global_crops,
        local_crops=config.local_crops,
        global_scale=config.global_scale,
        local_scale=config.local_scale,
        flip=bool(config.flip),
        jitter=config.jitter,
        grey=config.grey,
        blur=config.blur,
        solarize=config.solarize,
    )
