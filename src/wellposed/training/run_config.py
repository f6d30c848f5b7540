"""A run as data: the flags of a command, the fields of a file, the arguments of a function; what all kinds share."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tyro.constructors import PrimitiveConstructorSpec

from wellposed.errors import InvalidArgumentError
from wellposed.training.settings import Settings, require


def _paired(words: list[str]) -> dict[str, bool | int | float | str]:
    """NAME VALUE NAME VALUE ... as a dictionary, values as Python would read them."""
    if len(words) % 2:
        raise ValueError(f"{' '.join(words)!r}: expected pairs such as depth 6 embed_dim 64")
    return {name: _literal(value) for name, value in zip(words[::2], words[1::2], strict=True)}


def _literal(word: str) -> bool | int | float | str:
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), word)


ModelArgs = Annotated[
    dict[str, bool | int | float | str],
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="[NAME VALUE ...]",
        instance_from_str=_paired,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [str(word) for pair in value.items() for word in pair],
    ),
]
"""Arguments for timm.create_model; one flag on the command line, whatever its default holds."""

_DECIDED = dict.fromkeys(("in_chans", "num_classes"), "the data") | {
    "img_size": "the data, or --image-size",
    "patch_size": "--patch-size",
    "global_pool": "--pool",
    "pretrained": "this training, which starts from scratch,",
}


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """What every training has in common; a kind of training adds its own fields, and may have other defaults."""

    prefix: ClassVar[str] = ""
    """What the names of its folders begin with."""

    data: str = "shapes"
    """shapes, digits, cifar10:PATH, cifar100:PATH, pet:PATH or folder:PATH."""
    model: str = "vit_tiny_patch16_224"
    """Name of a timm model; image size, patch size, channels and classes follow the data."""
    skips: bool = True
    """Keep the skip connections, or cut those that --cut names."""
    cut: Literal["both", "attention", "mlp"] = "both"
    """What --no-skips cuts: the skips around attention, those around the MLP, or both."""
    init: Literal["default", "conditioned"] = "default"
    """The model's own initialization, or the conditioned one (arXiv 2510.00345)."""
    gray: Literal["none", "dct", "svd"] = "none"
    """Token Graying of every image's patches (arXiv 2505.01996)."""
    gray_eps: float | None = None
    """Its power, in (0, 1]; the paper's if None: 0.95 for dct, 0.7 for svd."""
    gray_at: Literal["patches", "tokens"] = "patches"
    """What is grayed: the pixels before they are embedded, or the embedded patches."""
    attention: Literal["softmax", "degree-1", "degree-2", "degree-3", "relu", "sigmoid"] = "softmax"
    """What attention applies to its logits: softmax, a power (arXiv 2410.18613), ReLU / n or sigmoid."""
    attention_scale: Literal["fixed", "learned", "none"] = "fixed"
    """Of a power: 1 / sqrt(n) for a row that sees n keys, that with a learned factor for each head, or 1."""
    low_rank: int | None = None
    """Rank of the two matrices of every MLP, made from thin factors (arXiv 2403.19243); full if None."""
    low_rank_activation: Literal["sine", "none"] = "sine"
    """Of those matrices: sin(omega U V^T) / sqrt(in), or U V^T as it is."""
    low_rank_omega: float | Literal["auto"] = "auto"
    """Of the sine; 6 sqrt(in) of each matrix with auto."""
    optimizer: Literal["adamw", "soap", "muon"] = "adamw"

    out: Path | None = None
    """Folder of the run; one under runs/ that says what is trained if None."""
    resume: bool = False
    """Go on with the run in --out, with the settings it was started with."""
    seed: int = 0
    epochs: int = 20
    batch_size: int = 256
    """Images in a step of all processes together."""
    lr: float | None = None
    """Highest learning rate; 1e-3 for adamw, 3e-3 for soap and muon if None."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 autocast, or float32 throughout; auto is bf16 on GPUs that have it."""
    compile: bool = False
    """Compile the model with torch.compile; on one GPU it is replayed as CUDA graphs, which takes more memory."""

    repeatable: bool = True
    """On a GPU, only kernels that give the same bits every time; without, runs are faster and resume up to rounding."""

    patch_size: int | None = None
    """Of a ViT, chosen to give 16 to 256 tokens if None; or of a ConvMixer, its own if None."""
    image_size: int | None = None
    """For sets without a size of their own: shapes (32 if None), pet and folder (224)."""
    pool: Literal["avg", "token"] = "avg"
    """What a ViT's head sees: the mean of the patch tokens, or the class token."""
    model_args: ModelArgs = field(default_factory=dict)
    """Further arguments of timm.create_model, such as depth 6 embed_dim 64 num_heads 4."""
    alpha: float = 2.0
    """Weight of the random part of W_Q W_K^T in the conditioned initialization."""
    beta: float = 0.6
    """Weight of the identity in it."""
    c: float = 3.0
    """Scale of W_V and of W_O."""

    weight_decay: float = 0.3
    betas: tuple[float, float] | None = None
    """The optimizer's own if None: (0.9, 0.999) for adamw, (0.95, 0.95) for soap, (0.9, 0.95) for muon."""
    precondition_frequency: int = 10
    """SOAP: steps between two refreshes of its bases."""
    max_precond_dim: int = 10000
    """SOAP: dimensions larger than this are not rotated."""
    soap_tf32: bool = True
    """SOAP: rotate in TF32 on a GPU, in half the time on ViT-S; on CIFAR-10 the losses differed by at most 1 %."""
    soap_spread: bool = False
    """SOAP: refresh a part of the bases at each step."""
    warmup_epochs: float = 1.0
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""

    workers: int = 4
    """Processes that read images of sets which do not fit in memory."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    checkpoint_minutes: float = 10.0
    """A checkpoint is written at the end of each epoch, and when this much time has passed since the last."""
    keep_every: int = 0
    """Epochs between two copies of the tested weights that stay, in kept/, to be evaluated later; 0 keeps none."""

    def check(self) -> None:
        """Raise InvalidArgumentError where a number lies outside what it is defined for."""
        for name in ("epochs", "batch_size", "log_every", "precondition_frequency"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("patch_size", "image_size"):
            require(self, name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        for name in ("lr", "weight_decay", "warmup_epochs", "clip", "workers", "checkpoint_minutes", "seed"):
            require(self, name, 0 <= (getattr(self, name) or 0) < math.inf, "a finite number, at least 0")
        require(self, "keep_every", self.keep_every >= 0, "at least 0")
        require(self, "lr", (self.lr or 0) <= 1e30, "at most 1e30")
        require(self, "betas", all(0 <= beta < 1 for beta in self.betas or ()), "two numbers in [0, 1)")
        require(self, "seed", self.seed < 2**63, "less than 2^63")
        require(self, "device", re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device), "auto, cpu, cuda or cuda:1")
        if self.skips and self.cut != "both":
            raise InvalidArgumentError(f"cut={self.cut!r} with the skips kept: expected it with --no-skips")
        if self.gray == "none" and (self.gray_eps is not None or self.gray_at != "patches"):
            raise InvalidArgumentError("gray_eps and gray_at without graying: expected them with --gray dct or svd")
        require(self, "gray_eps", 0 < (self.gray_eps or 1) <= 1 and self.gray_eps != 0, "a number in (0, 1]")
        if self.attention_scale != "fixed" and not self.attention.startswith("degree"):
            raise InvalidArgumentError(
                f"attention_scale={self.attention_scale!r} with attention={self.attention!r}: expected it with "
                "--attention degree-1, degree-2 or degree-3"
            )
        self._check_low_rank()
        for name in self.model_args:
            if name in _DECIDED:
                raise InvalidArgumentError(f"model_args has {name!r}, which {_DECIDED[name]} decides; leave it out")

    def _check_low_rank(self) -> None:
        require(self, "low_rank", self.low_rank is None or self.low_rank >= 1, "at least 1")
        omega, is_sine = self.low_rank_omega, self.low_rank_activation == "sine"
        require(self, "low_rank_omega", omega == "auto" or 0 < omega < math.inf, "auto, or a number above 0")
        if self.low_rank is None and not (is_sine and omega == "auto"):
            raise InvalidArgumentError(
                "low_rank_activation and low_rank_omega with matrices of full rank: expected them with --low-rank 4"
            )
        if omega != "auto" and not is_sine:
            raise InvalidArgumentError(f"low_rank_omega={omega}: expected it with --low-rank-activation sine")
        if self.low_rank is not None and self.init == "conditioned":
            raise InvalidArgumentError(
                f"low_rank={self.low_rank} with init='conditioned', which makes the same matrices orthogonal: expected "
                "one of the two"
            )

    @property
    def folder(self) -> Path:
        """`out`, or where the run goes if that is None."""
        kind = "skip" if self.skips else "skipless" if self.cut == "both" else f"no-{self.cut}-skip"
        gray = "" if self.gray == "none" else f"-{self.gray}{self.gray_eps or ''}-{self.gray_at}"
        attention = "" if self.attention == "softmax" else f"-{self.attention}"
        attention += "" if self.attention_scale == "fixed" else f"-scale-{self.attention_scale}"
        rank = "" if self.low_rank is None else f"-rank-{self.low_rank}-{self.low_rank_activation}"
        rank += "" if self.low_rank_omega == "auto" else f"-omega-{self.low_rank_omega:g}"
        name = f"{self.data.partition(':')[0]}-{self.model}-{kind}-{self.init}{gray}{attention}{rank}-{self.optimizer}"
        return self.out or Path("runs") / f"{self.prefix}{name}-{self.seed}"
