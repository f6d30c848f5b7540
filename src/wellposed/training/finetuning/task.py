"""What fine-tuning does at each step, whatever is learned: AdamW on what is trained, under a warm-up and a cosine.

Shapes: B rows of L tokens; inputs (B, K, L) as `wellposed.data.language.batches` has them.
"""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from wellposed.data import Loader
from wellposed.data.language import LanguageData
from wellposed.data.language.batches import RowLoader, TokenRows
from wellposed.data.language.tokens import Encoder
from wellposed.errors import InvalidArgumentError
from wellposed.optim import cosine_with_warmup, make_optimizer
from wellposed.runs import provenance
from wellposed.training.accelerators import use_bf16
from wellposed.training.finetuning.cards import model_card
from wellposed.training.finetuning.config import LanguageConfig
from wellposed.training.finetuning.methods import made_trainable, update_numbers
from wellposed.training.finetuning.models import open_language_model
from wellposed.training.guards import is_repeatable

_WEIGHTS = "trained.safetensors"


class LanguageTask(ABC):
    """A model of transformers' that learns from rows of tokens; to be made and used within `guards.repeatable`."""

    last_good: int | None = None

    def __init__(self, config: LanguageConfig, data: LanguageData, accelerator: Accelerator) -> None:
        self._config, self._data, self._accelerator = config, data, accelerator
        self.bf16 = use_bf16(config.precision, accelerator.device)
        base = torch.bfloat16 if self.bf16 and config.method != "full" else torch.float32
        opened = open_language_model(config, data.classes, base)
        self.tokenizer, self._padding = opened.tokenizer, opened.padding
        self.length = min(config.max_length, opened.context)
        self.encoder = Encoder(self.tokenizer, self.length)
        rows = self._rows()
        self._read_tests()
        self.model = made_trainable(opened.model, config, classifies=bool(data.classes)).to(accelerator.device)
        self._check()
        if config.batch_size > len(rows):
            raise InvalidArgumentError(
                f"batch_size={config.batch_size}: the {len(data)} examples make {len(rows)} rows; expected at most that"
            )
        self.loader: Loader = RowLoader(
            *(rows, config.batch_size),
            seed=config.seed,
            device=accelerator.device,
            rank=accelerator.process_index,
            ranks=accelerator.num_processes,
        )
        net = self._net()
        with self._autocast():
            self.is_repeatable = is_repeatable(net, rows.rows[0][None].to(accelerator.device))
        self._forward = accelerator.prepare_model(net)
        self._optimizer = make_optimizer(
            "adamw", self.model, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas
        )
        self._steps = config.epochs * len(self.loader)
        self._warmup = min(self._steps - 1, round(config.warmup_epochs * len(self.loader)))
        self._taken = 0
        self._results: dict[str, float] = {}

    @abstractmethod
    def _rows(self) -> TokenRows:
        """What to train on."""

    @abstractmethod
    def _read_tests(self) -> None:
        """Turn what to test on into tokens."""

    @abstractmethod
    def _net(self) -> nn.Module:
        """From inputs (B, K, L) to logits."""

    @abstractmethod
    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum of -log p of the targets."""

    @abstractmethod
    def _counted(self, targets: Tensor) -> Tensor:
        """How many targets there are."""

    @abstractmethod
    def _test(self, name: str) -> dict[str, float]:
        """The scores on the test set `name`."""

    @abstractmethod
    def _check(self) -> None:
        """Raise where the model cannot do what is asked of it."""

    def train_step(self, images: Tensor, targets: Tensor, step: int) -> dict[str, Tensor]:
        """One step of the optimizer, on rows of tokens; all targets of all processes weigh the same."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self._optimizer.zero_grad()
        total = self._accelerator.reduce(self._counted(targets).float(), "mean")
        size = self._config.micro_batch or len(images)
        sums = torch.zeros((), device=images.device)
        for inputs, wanted in zip(images.split(size), targets.split(size), strict=True):
            with self._autocast():
                logits = self._forward(inputs)
            loss = self._losses(logits, wanted) / total
            self._accelerator.backward(loss)
            sums += loss.detach()
        reported = {"loss": sums}
        if self._config.clip:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            reported["grad_norm"] = nn.utils.clip_grad_norm_(trained, self._config.clip, foreach=True)
        self._optimizer.step()
        self._taken = step + 1
        return reported

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._accelerator.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def learning_rate(self, step: int) -> float:
        assert self._config.lr is not None
        return self._config.lr * cosine_with_warmup(step, steps=self._steps, warmup=self._warmup)

    def judge(self, step: int, values: dict[str, float]) -> None:
        """Nothing: numbers that are not finite, the loop sees itself."""
        return

    @property
    def is_last(self) -> bool:
        """Whether all steps have been taken."""
        return self._taken == self._steps

    def evaluate(self) -> dict[str, float]:
        """The scores on every test set, under its name where there are several, and then their means too."""
        self.model.eval()
        found = {name: self._test(name) for name in self._data.tests}
        self.model.train()
        if len(found) == 1:
            self._results = next(iter(found.values()))
        elif found:
            shared = set.intersection(*(set(values) for values in found.values()))
            means = {key: sum(each[key] for each in found.values()) / len(found) for key in sorted(shared)}
            self._results = means | {f"{name}/{key}": v for name, values in found.items() for key, v in values.items()}
        return self._results

    def _share(self, items: Any) -> Any:
        """Those of `items` that this process tests."""
        return items[self._accelerator.process_index :: self._accelerator.num_processes]

    def observed(self, look: Callable[[nn.Module], dict[str, Any]]) -> dict[str, Any]:
        """What `look` sees of the model, in eval mode."""
        seen = look(self.model.eval())
        self.model.train()
        return seen

    def parameter_counts(self) -> tuple[int, int]:
        """How many numbers are trained, and how many there are."""
        counts = [(parameter.numel(), parameter.requires_grad) for parameter in self.model.parameters()]
        return sum(count for count, trained in counts if trained), sum(count for count, _ in counts)

    @property
    def facts(self) -> dict[str, Any]:
        """What else is to be known about the run: its size, what was cut, and the rank of what was learned."""
        trained, whole = self.parameter_counts()
        facts = {
            "trained_parameters": trained,
            "all_parameters": whole,
            "examples": len(self._data),
            "max_length": self.length,
            "sequences_cut": self.encoder.cut,
            "sequences_read": self.encoder.seen,
        }
        return facts if self._config.method == "full" else facts | update_numbers(self.model)

    def _trained(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def save_weights(self, folder: Path) -> None:
        save_file({name: value.detach().contiguous() for name, value in self._trained().items()}, folder / _WEIGHTS)

    @torch.no_grad()
    def load_weights(self, folder: Path) -> None:
        found = load_file(folder / _WEIGHTS)
        for name, value in self._trained().items():
            value.copy_(found[name])

    def save_tested(self, folder: Path) -> None:
        """The adapter as PEFT saves it, or the model, with its tokenizer and its card, in a folder within `folder`."""
        target = folder / ("model" if self._config.method == "full" else "adapter")
        written = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(written, ignore_errors=True)
        options = {} if self._config.method == "full" else {"save_embedding_layers": False}
        self.model.save_pretrained(str(written), **options)
        self.tokenizer.save_pretrained(str(written))
        facts = self.facts | provenance(self._accelerator.device, seed=self._config.seed)
        card = model_card(self._config, self._data, self._results, facts)
        (written / "README.md").write_text(card, encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        written.replace(target)

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
