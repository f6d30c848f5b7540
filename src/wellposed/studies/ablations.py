"""What a study compares, as data: the kinds of model it trains, how they are drawn, and what its page says of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from wellposed.studies.words import on_attention, on_conditioning, on_graying, on_low_rank, on_skips

if TYPE_CHECKING:
    from wellposed.studies.comparison import StudyResult

BLUE, RED, GREEN, PURPLE = "#4477aa", "#ee6677", "#228833", "#aa3377"


@dataclass(frozen=True)
class Kind:
    """One of the models that are compared."""

    key: str
    """As in the names of its runs and in --kinds."""
    name: str
    """As in tables and legends."""
    settings: Mapping[str, Any]
    """The fields of TrainConfig that make it what it is."""
    colour: str
    style: str = "-"
    """Of its curves: "-", "--" or ":"."""
    needs: frozenset[str] = frozenset()
    """The skips, "attention" or "mlp", that blocks must have for this to be a model of its own."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """A study: one model, trained in several ways that differ in one thing."""

    title: str
    """Of its page."""
    kinds: tuple[Kind, ...]
    words: Callable[["StudyResult"], str]
    """What the numbers say, where all kinds have been compared."""
    uses: frozenset[str]
    """The fields of StudyConfig that not every study has a use for, and this one has.

    A rate that is named after a kind and an optimizer, as in lr_skip_adamw, is that kind's; else lr_adamw is.
    """
    paper: str = ""
    """What the paper found, for the reader to compare."""
    shows: tuple[Literal["matrices", "attention", "graying", "norms", "ranks"], ...] = ("attention",)
    """What the page shows beside the table, the curves and the state of every block."""
    needs_attention: bool = False
    """Whether a model without attention is refused; what `shows` names is left out for it otherwise."""

    def kind(self, key: str) -> Kind:
        """The kind with this key."""
        return next(kind for kind in self.kinds if kind.key == key)


CONDITIONING = Ablation(
    title="Do transformers need their skips?",
    kinds=(
        Kind("skip", "with skips", {"skips": True}, BLUE),
        Kind("skipless", "skipless, default initialization", {"skips": False}, RED, "--"),
        Kind("conditioned", "skipless, conditioned initialization", {"skips": False, "init": "conditioned"}, GREEN),
    ),
    words=on_conditioning,
    uses=frozenset(
        {"alpha", "beta", "c"}
        | {f"lr_{kind}_{optimizer}" for kind in ("skip", "skipless", "conditioned") for optimizer in ("adamw", "soap")}
    ),
    shows=("matrices", "attention"),
    needs_attention=True,
)
"""Cutting the Skip, arXiv 2510.00345."""

_BOTH = frozenset({"attention", "mlp"})
SKIPS = Ablation(
    title="Which skips does it need?",
    kinds=(
        Kind("all", "with skips", {"skips": True}, BLUE),
        Kind("no-mlp", "without the MLP's skips", {"skips": False, "cut": "mlp"}, GREEN, needs=_BOTH),
        Kind("no-attention", "without attention's skips", {"skips": False, "cut": "attention"}, RED, "--", needs=_BOTH),
        Kind("none", "without skips", {"skips": False}, PURPLE, ":"),
    ),
    words=on_skips,
    uses=frozenset({"lr_adamw", "lr_soap", "rates"}),
    paper="Always Skip Attention (arXiv 2505.01996) reports for ViT-Tiny on CIFAR-10 about 92 % with both skips, 90 % "
    "without the MLP's and 70 % without attention's; its ConvMixer-Tiny changed by 0.2 without its one skip, which is "
    "around the convolution that mixes tokens.",
)
"""Always Skip Attention, arXiv 2505.01996."""


def _grayed(kind: str, eps: float, colour: str) -> Kind:
    style = "-" if kind == "svd" else "--"
    name = f"{kind.upper()} graying, eps {eps:g}"
    return Kind(f"{kind}-{eps:g}", name, {"gray": kind, "gray_eps": eps}, colour, style)


GRAYING = Ablation(
    title="Does graying the input help?",
    kinds=(
        Kind("plain", "without graying", {}, BLUE),
        _grayed("svd", 0.9, "#88ccaa"),
        _grayed("svd", 0.7, GREEN),
        _grayed("svd", 0.5, "#999933"),
        _grayed("dct", 0.95, RED),
        _grayed("dct", 0.8, PURPLE),
    ),
    words=on_graying,
    uses=frozenset({"lr_adamw", "lr_soap", "rates"}),
    paper="Always Skip Attention (arXiv 2505.01996) reports for ViT-B on ImageNet 81.0 % without graying, 81.3 with "
    "the DCT at 0.95, and with the SVD 81.2 at 0.9, 81.4 at 0.7 and 81.0 at 0.5: differences that short runs on small "
    "sets cannot tell from those between seeds.",
    shows=("graying",),
    needs_attention=True,
)
"""Always Skip Attention, Token Graying."""


def _power(degree: int, colour: str, style: str = "-") -> Kind:
    return Kind(f"degree-{degree}", f"x^{degree} / sqrt(N)", {"attention": f"degree-{degree}"}, colour, style)


_THIRD = {"attention": "degree-3"}
ATTENTION = Ablation(
    title="Does attention need softmax?",
    kinds=(
        Kind("softmax", "softmax", {}, BLUE),
        _power(1, "#88ccaa", "--"),
        _power(2, "#999933", "--"),
        _power(3, GREEN),
        Kind("unscaled", "x^3, unscaled", {**_THIRD, "attention_scale": "none"}, "#225522", ":"),
        Kind("relu", "ReLU / N", {"attention": "relu"}, "#ccbb44"),
        Kind("sigmoid", "sigmoid", {"attention": "sigmoid"}, PURPLE),
        Kind("skipless", "x^3 / sqrt(N), skipless", {**_THIRD, "skips": False}, RED, ":", needs=_BOTH),
        Kind(
            "conditioned",
            "x^3 / sqrt(N), skipless, conditioned",
            {**_THIRD, "skips": False, "init": "conditioned"},
            RED,
            "--",
            needs=_BOTH,
        ),
    ),
    words=on_attention,
    uses=frozenset({"alpha", "beta", "c", "lr_adamw", "lr_soap", "rates"}),
    paper="Rethinking Softmax (arXiv 2410.18613) reports for ViT-B on ImageNet 79.6 % with softmax and x^3/14, for "
    "ViT-S 80.2 and 80.5, with no word on seeds; unscaled powers did not train for it on COCO.",
    shows=("norms",),
    needs_attention=True,
)
"""Rethinking Softmax, arXiv 2410.18613. N is the number of keys that a row can see."""

RANKS = (1, 4, 16, 64)


def low_rank(ranks: Sequence[int]) -> Ablation:
    """Sine-activated low-rank matrices, arXiv 2403.19243, in the place of those of the MLPs."""
    plain, sine = ("#99bbdd", "#77aacc", BLUE, "#224466"), ("#f4aab4", RED, "#bb4455", "#772233")
    kinds = [Kind("full", "full rank", {}, GREEN, ":")]
    for place, rank in enumerate(ranks):
        shade = 3 if len(ranks) == 1 else 3 * place // (len(ranks) - 1)
        settings = {"low_rank": rank, "low_rank_activation": "none"}
        kinds.append(Kind(f"plain-{rank}", f"rank {rank}", settings, plain[shade], "--"))
        kinds.append(Kind(f"sine-{rank}", f"sine of rank {rank}", {"low_rank": rank}, sine[shade]))
    return Ablation(
        title="Does a sine make up for a low rank?",
        kinds=tuple(kinds),
        words=on_low_rank,
        uses=frozenset({"ranks", "omega", "lr_adamw", "lr_soap", "rates"}),
        paper="The paper (arXiv 2403.19243) reports for ViT-B, its MLPs of low rank, 80.5 % at full rank, and at rank "
        "1, 5, 10, 20, 100, 150 and 250 plain 72.7, 73.6, 73.8, 75.5, 79.4, 80.3 and 80.5, with the sine 73.8, 76.0, "
        "76.9, 78.3, 79.9, 80.7 and 81.1.",
        shows=("ranks",),
        needs_attention=True,
    )


ABLATIONS: Mapping[str, Ablation] = {
    "conditioning": CONDITIONING,
    "skips": SKIPS,
    "graying": GRAYING,
    "attention": ATTENTION,
    "low-rank": low_rank(RANKS),
}
