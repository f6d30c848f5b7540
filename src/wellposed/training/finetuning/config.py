"""What fine-tuning is, as data: flags, fields of a file, arguments of `finetune_language` and `finetune_vision`."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

from wellposed.training.settings import Settings, require

Method = Literal["full", "lora", "rslora", "dora", "sine", "sine-dora"]
LEARNING_RATES = {"full": 2e-5, "adapter": 2e-4}


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Settings):
    """What fine-tuning has in common, whatever the model reads; a kind of data adds its own fields."""

    presets: ClassVar[Path] = Path(__file__).parent / "presets"
    learning_rates: ClassVar[dict[str, float]] = LEARNING_RATES
    """For all weights, and for an adapter."""

    method: Method = "sine"
    """All weights, or an adapter: LoRA, rsLoRA, DoRA, SineLoRA or SineDoRA (arXiv 2403.19243)."""
    r: int = 8
    """Rank of the adapter."""
    lora_alpha: float | None = None
    """The update is scaled by lora_alpha / r, or lora_alpha / sqrt(r) for rsLoRA; 2 r if None."""
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] = ()
    """Ends of the names of layers to adapt, such as q_proj v_proj; all linear ones but the head if none is named."""
    omega: float | Literal["auto"] = "auto"
    """Of sine adapters. With auto, omega / g is 173.2 / sqrt(r): LoRA with its alpha times that is the control."""
    gain: float | None = None
    """Of sine adapters: g, sqrt(in_features) if None."""

    limit: int | None = None
    """At most so many examples of each set."""
    epochs: int = 3
    batch_size: int = 16
    """Examples in a step of all processes together; rows of tokens where several are packed into one."""
    micro_batch: int | None = None
    """Examples at a time of each process, whose gradients add up to those of the step; all of its own if None."""
    lr: float | None = None
    """Highest learning rate; 2e-5 for full and 2e-4 for adapters if None."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_epochs: float = 0.1
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 autocast, with adapters on a bf16 model, or float32 throughout; auto is bf16 on GPUs that have it."""
    compile: bool = False
    """Compile the model's repeated blocks by torch.compile for training; tests go without."""
    test_batch_size: int = 32
    test_every: int = 1
    """Epochs between two tests; what the last one leaves is always tested."""

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for."""
        for name in ("r", "epochs", "batch_size", "log_every", "test_batch_size", "test_every"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("limit", "micro_batch"):
            require(self, name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        for name in ("lr", "weight_decay", "warmup_epochs", "clip", "checkpoint_minutes", "keep_every"):
            require(self, name, 0 <= (getattr(self, name) or 0) < math.inf, "a finite number, at least 0")
        require(self, "lora_dropout", 0 <= self.lora_dropout < 1, "a number in [0, 1)")
        require(self, "lora_alpha", self.lora_alpha is None or 0 < self.lora_alpha < math.inf, "a number above 0")
        for name in ("omega", "gain"):
            value = getattr(self, name)
            require(self, name, value in {"auto", None} or 0 < value < math.inf, "a number above 0")
            is_own = self.method.startswith("sine") or value in {"auto", None}
            require(self, name, is_own, f"it with --method sine or sine-dora, not {self.method}")
        require(self, "betas", all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)")
        require(self, "seed", 0 <= self.seed < 2**63, "0 to 2^63 - 1")
        require(self, "device", re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device), "auto, cpu, cuda or cuda:1")

    def resolved(self) -> Self:
        """With everything filled in that follows from the method."""
        usual = self.learning_rates["full" if self.method == "full" else "adapter"]
        return replace(
            self,
            out=self.folder,
            lr=usual if self.lr is None else self.lr,
            lora_alpha=2.0 * self.r if self.lora_alpha is None else self.lora_alpha,
        )

    @property
    def sets(self) -> str:
        """What it learns from, as a part of a folder's name."""
        raise NotImplementedError

    @property
    def folder(self) -> Path:
        """`out`, or where the run goes if that is None."""
        rank = "" if self.method == "full" else f"-r{self.r}"
        name = f"finetune-{self.sets}-{Path(self.model).stem}-{self.method}{rank}-{self.seed}"
        return self.out or Path("runs") / name


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(FinetuneConfig):
    """Fine-tuning of a language model on completions, or of any transformer on labelled texts."""

    data: tuple[str, ...] = ()
    """To train on, all together: .jsonl, .json or .tsv files, or folders with such files called train, test or dev."""
    test: tuple[str, ...] = ()
    """To test on, each by itself; the test or dev files of the folders in --data if none is given."""
    model: str = ""
    """A folder with safetensors and a tokenizer as transformers writes it, or a .gguf file."""
    tokenizer: Path | None = None
    """A folder with the tokenizer, where the model's has none."""
    download: bool = False
    """Let transformers fetch --model by its name from where it fetches models."""

    max_length: int = 512
    """Tokens of a sequence, and of a row into which sequences are packed; at most what the model takes."""
    pack: bool = True
    """Put several completions into a row; none of them sees another."""
    answers: Literal["names", "texts"] = "names"
    """How a question that lists options, as in "Answer1: a text Answer2: another", is answered: by the name of one, or,
    without the list, by its text, the likeliest per character. Written answers may then need more --new-tokens."""
    generate: int = 100
    """Test examples of each set that are also answered in writing after the last epoch; 0 for none."""
    new_tokens: int = 32
    """Tokens that may be written."""

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for."""
        require(self, "data", self.data, "files or folders, as in --data train.jsonl")
        require(self, "model", self.model, "a folder with a model or a .gguf file, as in --model path/to/model")
        super().check()
        require(self, "new_tokens", self.new_tokens >= 1, "at least 1")
        require(self, "max_length", self.max_length >= 2, "at least 2")
        require(self, "generate", self.generate >= 0, "at least 0")

    @property
    def sets(self) -> str:
        """What it learns from, as a part of a folder's name."""
        return "+".join(Path(each).stem for each in self.data)
