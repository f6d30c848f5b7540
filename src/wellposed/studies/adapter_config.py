"""LoRA, its kin and sine adapters on one model, as data: methods x ranks x seeds.

wellposed study --ablation adapters --model FOLDER --data arc-easy boolq          completions: one run learns all sets
wellposed study --ablation adapters --model FOLDER --data glue/CoLA glue/RTE      labelled texts: a run for each set
wellposed study --ablation adapters --modality vision --model NAME --data pet:PATH
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wellposed.errors import InvalidArgumentError
from wellposed.training.config import ModelArgs
from wellposed.training.finetuning.config import LanguageConfig
from wellposed.training.finetuning.vision_config import VisionConfig

if TYPE_CHECKING:
    from wellposed.training.finetuning.config import FinetuneConfig

Method = Literal["full", "lora", "rslora", "dora", "sine", "sine-dora", "lora-control"]
CONFIGS: dict[str, "type[FinetuneConfig]"] = {"language": LanguageConfig, "vision": VisionConfig}


@dataclass(frozen=True)
class AdapterCell:
    """One run of the study; all weights have no rank, which is 0 then."""

    method: Method
    rank: int
    seed: int
    task: str = ""
    """The set it learns from, where each has runs of its own."""

    def __str__(self) -> str:
        task = f"{self.task}-" if self.task else ""
        rank = f"-r{self.rank}" if self.rank else ""
        return f"{task}{self.method}{rank}-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class AdapterStudy:
    """Fine-tune one model by several adapters of several ranks, and show what each learns."""

    ablation: Literal["adapters"] = "adapters"
    modality: Literal["language", "vision"] = "language"
    """What is fine-tuned, as by wellposed finetune language or vision."""
    model: str = ""
    """As --model of wellposed finetune: a folder or a .gguf file, or for vision also a timm name."""
    data: tuple[str, ...] = ()
    """Sets as --data of wellposed finetune names them."""
    test: tuple[str, ...] = ()
    """For sets that are learned together: to test on, each by itself; the test or dev files of --data if none."""
    together: bool | None = None
    """Learn from the union of the sets, and be tested on each; or have a run for each set. If None, completions are
    learned together, labelled texts and images apart."""
    methods: tuple[Method, ...] = ("lora", "rslora", "dora", "sine", "sine-dora", "lora-control")
    """lora-control is LoRA with its alpha times omega / g: what sine adapters are as long as the sine is straight.
    full trains all weights."""
    ranks: tuple[int, ...] = (4, 16)
    out: Path = Path("runs/adapters")
    """Folder of the study; type the same command again to go on with one that was interrupted."""
    seed: int = 0
    """The first seed."""
    seeds: int = 2
    """Number of seeds."""
    jobs: int = 2
    """Runs side by side, in processes of their own."""
    device: str = "auto"

    epochs: int | None = None
    """This and what follows: as finetune has it if None."""
    batch_size: int | None = None
    lr: float | None = None
    rates: ModelArgs = field(default_factory=dict)
    """Exceptions, methods with another learning rate, such as full 2e-5."""
    lora_alpha: float | None = None
    """2 r if None."""
    target_modules: tuple[str, ...] = ()
    omega: float | Literal["auto"] = "auto"
    gain: float | None = None
    limit: int | None = None
    """At most so many examples of each set."""
    settings: ModelArgs = field(default_factory=dict)
    """Further settings of finetune, such as max_length 256 generate 0."""

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for, or would have no effect."""
        for name in ("seeds", "jobs"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name}={getattr(self, name)}: expected at least 1")
        for name, given in (("methods", self.methods), ("ranks", self.ranks), ("data", self.data)):
            if not given or len(set(given)) != len(given):
                raise InvalidArgumentError(f"{name}={given}: expected at least one, each once")
        if min(self.ranks) < 1:
            raise InvalidArgumentError(f"ranks={self.ranks}: expected whole numbers from 1")
        self._check_names()
        if self.modality == "vision" and self.together:
            raise InvalidArgumentError("together=True: expected sets of images apart, each has its own classes")
        if self.test and (self.together is False or self.modality == "vision"):
            raise InvalidArgumentError(
                f"test={' '.join(self.test)}: expected it with --together True; a set that is learned apart is a "
                "folder with its own test or dev file"
            )
        names = [task_name(each) for each in self.data]
        if self.together is False and len(set(names)) != len(names):
            raise InvalidArgumentError(f"data={' '.join(self.data)}: expected sets of different names")
        for cell in self.cells():
            self.run(cell).check()

    def _check_names(self) -> None:
        """Of the methods in `rates`, and of the fields in `settings`."""
        for method, rate in self.rates.items():
            if method not in self.methods or isinstance(rate, bool | str):
                raise InvalidArgumentError(
                    f"rates has {method} {rate}: expected a number for one of {', '.join(self.methods)}"
                )
        own = {known.name for known in fields(self)} | {"method", "r", "resume"}
        for name in self.settings:
            known = [each.name for each in fields(CONFIGS[self.modality]) if each.name not in own]
            if name not in known:
                raise InvalidArgumentError(f"settings has {name!r}: expected some of {', '.join(sorted(known))}")

    @property
    def unpacked(self) -> Path | None:
        """The folder that a .gguf file is unpacked into, once for all runs; None for another model."""
        return self.out / "model" if self.model.endswith(".gguf") else None

    def cells(self) -> Iterator[AdapterCell]:
        """Every run, one seed after the other."""
        for seed in range(self.seed, self.seed + self.seeds):
            for task in [""] if self.together else [task_name(each) for each in self.data]:
                for place, rank in enumerate(self.ranks):
                    for method in self.methods:
                        if method != "full" or place == 0:
                            yield AdapterCell(method, 0 if method == "full" else rank, seed, task)

    def run(self, cell: AdapterCell) -> "FinetuneConfig":
        """What `cell` trains, and where."""
        chosen = tuple(each for each in self.data if cell.task in {"", task_name(each)})
        is_sine = cell.method.startswith("sine")
        alpha = self.lora_alpha
        if cell.method == "lora-control":
            alpha = (2.0 * cell.rank if alpha is None else alpha) * control_factor(cell.rank, self.omega, self.gain)
        rate = self.rates.get(cell.method, self.lr)
        asked = {"r": cell.rank or None, "epochs": self.epochs, "batch_size": self.batch_size, "limit": self.limit}
        settings: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        if self.test:
            settings["test"] = self.test
        return CONFIGS[self.modality](
            data=chosen if self.modality == "language" else chosen[0],
            model=str(self.unpacked or self.model),
            method="lora" if cell.method == "lora-control" else cell.method,
            lora_alpha=alpha,
            lr=None if rate is None else float(rate),
            target_modules=self.target_modules,
            omega=self.omega if is_sine else "auto",
            gain=self.gain if is_sine else None,
            out=self.out / "runs" / str(cell),
            seed=cell.seed,
            device=self.device,
            **(settings | self.settings),
        )


def task_name(data: str) -> str:
    """What a set is called: the end of its path, or the word before it."""
    word, _, path = data.partition(":")
    return word if path else Path(data).stem if Path(data).suffix in {".json", ".jsonl", ".tsv"} else Path(data).name


def control_factor(rank: int, omega: float | Literal["auto"], gain: float | None) -> float:
    """What LoRA's alpha is to be multiplied by for an update that is that of a sine adapter to first order: omega / g.

    s sin(omega B A) / g is s (omega / g) B A as long as omega B A is small. For omega = "auto" and g = sqrt(in), or two
    numbers, this is the same for all layers, as it has to be.

    Example:
        >>> round(8 * control_factor(4, "auto", None), 1), round(32 * control_factor(16, "auto", None), 1)
        (692.8, 1385.6)
    """
    from wellposed.lowrank.frequency import adapter_omega  # now, and not before: it needs torch

    if omega == "auto" and gain is None:
        one_input = 1  # omega / g of one layer is that of all
        return adapter_omega(rank, (3 * one_input) ** -0.5) / sqrt(one_input)
    if omega == "auto" or gain is None:
        raise InvalidArgumentError(
            f"lora-control with omega={omega}, gain={gain}: omega / g would differ from layer to layer, and LoRA has "
            "one alpha; expected both as numbers, or neither"
        )
    return omega / gain
