"""Fine-tuning on labelled images: cross-entropy of the class under a new head, tested by accuracy.

Shapes: B images of C channels, H by W pixels.
"""

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.data import Dataset, ImageSet, open_loader
from wellposed.errors import InvalidArgumentError
from wellposed.evaluation.language.metrics import confusion, scores
from wellposed.recipes import describe, write
from wellposed.runs import write_json
from wellposed.training.classification import augmenting, cross_entropy
from wellposed.training.finetuning.cards import Card, model_card
from wellposed.training.finetuning.heads import check_targets, give_head, linear_layers
from wellposed.training.finetuning.methods import made_trainable
from wellposed.training.finetuning.task import FinetuneTask
from wellposed.training.finetuning.vision_config import VisionConfig
from wellposed.training.finetuning.vision_models import OpenedVision

_PREPROCESSOR = "preprocessor_config.json"


class ImageClasses(nn.Module):
    """The logits (B, classes) of a model for images (B, C, H, W), brought to its size."""

    def __init__(self, model: Any, size: int, options: dict[str, Any], *, of_transformers: bool) -> None:
        super().__init__()
        self.model, self._size, self._options, self._of_transformers = model, size, options, of_transformers

    def forward(self, images_BCHW: Tensor) -> Tensor:
        if images_BCHW.shape[-1] != self._size:
            images_BCHW = F.interpolate(images_BCHW, (self._size, self._size), mode="bicubic", antialias=True)
        if self._of_transformers:
            return self.model(pixel_values=images_BCHW, **self._options).logits
        return self.model(images_BCHW)


class ImageTask(FinetuneTask):
    """Cross-entropy of the classes of images."""

    def __init__(
        self, config: VisionConfig, opened: OpenedVision, data: Dataset, test: Dataset, accelerator: Accelerator
    ) -> None:
        super().__init__(config, accelerator)
        self._config, self._opened, self._data = config, opened, data
        self._of_transformers = hasattr(opened.model, "config")
        heads = [*give_head(opened.model, data.classes), *opened.new]
        self._header: dict[str, Any] | None = None
        if config.method == "full" and not self._of_transformers:  # now: it raises where it could not be saved
            made = opened.arguments
            self._header = describe(opened.model, made and made | {"num_classes": len(data.classes)})
        check_targets(config.target_modules, heads)
        how: dict[str, Any] = {"modules_to_save": heads}
        if config.method != "full" and not config.target_modules:
            how["target_modules"] = linear_layers(opened.model, heads)
        self._options = _size_options(opened)
        self.model = made_trainable(opened.model.to(self.base_dtype), config, how).to(accelerator.device)
        self.loader, self._test = self._loaders(data, test)
        self._begin(torch.zeros(2, *data.image_shape))

    def _loaders(self, data: Dataset, test: Dataset) -> Any:
        here, config = self._accelerator, self._config
        place = {"device": here.device, "rank": here.process_index, "ranks": here.num_processes}
        mean, std = self._opened.statistics or (None, None)
        common: dict[str, Any] = {**place, "workers": config.workers}
        train = open_loader(
            data, config.batch_size, **common, seed=config.seed, mean=mean, std=std, **augmenting(config, data)
        )
        size = config.test_batch_size * here.num_processes
        return train, open_loader(test, size, **common, shuffle=False, mean=train.mean, std=train.std)

    def _net(self) -> nn.Module:
        return ImageClasses(self.model, self._opened.image_size, self._options, of_transformers=self._of_transformers)

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets, label_smoothing=self._config.label_smoothing, reduction="sum")

    def _counted(self, targets: Tensor) -> Tensor:
        return torch.full((), len(targets), device=targets.device)

    @torch.no_grad()
    def _tested(self) -> dict[str, float]:
        """Cross-entropy, the scores of `metrics.scores`, and the mean of the accuracies of the classes."""
        classes, place, net = len(self._data.classes), self._accelerator, self._net().eval()
        if place.num_processes > 1:  # BatchNorm's: what is tested is what the first process saves
            for buffer in self.model.buffers():
                torch.distributed.broadcast(buffer, 0)
        loss = torch.zeros((), dtype=torch.float64, device=place.device)
        counts = torch.zeros(classes, classes, dtype=torch.long, device=place.device)
        for images, labels in self._test:
            with self._autocast():
                logits = net(images)
            loss += cross_entropy(logits, labels, reduction="sum")
            counts += confusion(logits.argmax(1), labels, classes)
        loss, counts = (place.reduce(each, "sum") for each in (loss, counts))
        return {"loss": float(loss / counts.sum()), **scores(counts), "class_accuracy": class_accuracy(counts)}

    @property
    def facts(self) -> dict[str, Any]:
        """What else is to be known about the run: its size, what the model saw, and the rank of what was learned."""
        statistics = {
            name: [round(number, 4) for number in value.flatten().tolist()]
            for name, value in (("mean", self.loader.mean), ("std", self.loader.std))
        }
        seen = {"image_size": self._opened.image_size, **statistics}
        return super().facts | {"examples": len(self._data)} | seen

    def _save_model(self, folder: Path) -> None:
        if self._header is not None:
            write(self.model, folder, self._header)
        else:
            self.model.save_pretrained(str(folder))

    def _save_more(self, folder: Path) -> None:
        """How transformers is to prepare images, where the model's folder says it, for the size that was trained on."""
        path = Path(self._config.model) / _PREPROCESSOR
        if path.is_file():
            settings = json.loads(path.read_text(encoding="utf-8"))
            if self._options:  # another size than the model was made for
                size = {"height": self._opened.image_size, "width": self._opened.image_size}
                settings |= {name: size for name in ("size", "crop_size") if name in settings}
            write_json(folder / _PREPROCESSOR, settings)

    def _card(self, facts: dict[str, Any]) -> str:
        count, size = len(self._data.classes), self._opened.image_size
        told = f"Trained on {len(self._data)} images of {count} classes: {', '.join(self._data.classes)}."
        new = " The base model was at its initialization, not pretrained." if self._opened.is_new else ""
        seen = f"It takes images of {size} x {size} pixels in [0, 1], less the mean and divided by the std below."
        return model_card(
            self._config,
            Card(
                data=self._data.name,
                told=f"{told}{new}\n\n{seen}{_asked(self._options)}",
                pipeline="image-classification",
                library="transformers" if self._of_transformers else "wellposed",
                own_settings=("image_size", "label_smoothing", "crop", "flip", "mixup", "cutmix"),
                **_use(self._opened, count),
            ),
            self._results,
            facts,
        )


def class_accuracy(counts: Tensor) -> float:
    """The mean over the classes, of those that occur, of how often each was recognized.

    Example:
        >>> class_accuracy(torch.tensor([[8, 0, 0], [1, 1, 0], [0, 0, 0]]))
        0.75
    """
    occurring = counts.sum(1) > 0
    return float((counts.diagonal()[occurring].double() / counts.sum(1)[occurring]).mean())


def with_channels(data: Dataset, channels: int) -> Dataset:
    """`data` as a model with so many channels takes it: grey images three times over."""
    own = data.image_shape[0]
    if own == channels:
        return data
    if own != 1 or not isinstance(data, ImageSet):
        raise InvalidArgumentError(f"the model takes {channels} channels and images of {data.name} have {own}")
    return replace(data, images=data.images.expand(-1, channels, -1, -1))


def _size_options(opened: OpenedVision) -> dict[str, Any]:
    """What a model of transformers' must be told where images are not of the size that it was made for."""
    if "interpolate_pos_encoding" not in inspect.signature(opened.model.forward).parameters:
        return {}
    own = opened.model.config.image_size
    is_own = (own[0] if isinstance(own, list | tuple) else own) == opened.image_size
    return {} if is_own else {"interpolate_pos_encoding": True}


def _asked(options: dict[str, Any]) -> str:
    return "".join(f" Call it with {name}={value}." for name, value in options.items())


def _use(opened: OpenedVision, classes: int) -> dict[str, str]:
    """How to make the model again, for its card."""
    if hasattr(opened.model, "config"):
        kind = "AutoModelForImageClassification"
        options = f"num_labels={classes}, ignore_mismatched_sizes=True"
        return {
            "imports": f"from transformers import {kind}",
            "base": f'{kind}.from_pretrained("path/to/the/base/model", {options})',
            "whole": f'{kind}.from_pretrained("path/to/this/folder")',
        }
    whole = {"imports": "import wellposed", "whole": 'wellposed.load("path/to/this/folder")'}
    if opened.arguments is None:
        base = 'wellposed.load("path/to/the/base/model")'
        return whole | {"base": f"{base}\nbase.reset_classifier({classes})"}
    options = ", ".join(f"{name}={value!r}" for name, value in (opened.arguments | {"num_classes": classes}).items())
    created = f'timm.create_model("{opened.name}", {options})  # with the weights of the base model'
    return whole | {"imports": "import timm", "base": created}
