"""What `diagnose` found, as data, as text and as curves."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.reporting import Curves, Line, curves_figure, text_table
from wellposed.spectrum import JacobianSpectrum

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGES = ("input", "attention input", "convolution", "attention", "after attention", "mlp", "output")
"""Where tokens are measured, in the order in which they pass; "attention" and "mlp" before they meet the skip."""
STYLES = {
    "attention": ("#ee6677", "-"),
    "mlp": ("#4477aa", "-"),
    "after attention": ("#ccbb44", ":"),
    "output": ("#228833", ":"),
}
"""Of the curves: what attention and MLP give, and dotted what becomes of it with the skip."""


@dataclass(frozen=True)
class Spread:
    """A number that differs from input to input."""

    low: float
    """A tenth of the inputs lie below ..."""
    median: float
    high: float
    """... and a tenth above."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of the batch at one place, a matrix with a row per token for each input."""

    condition: Spread
    """Condition number; infinite where the matrix is singular as far as float32 can tell."""
    stable_rank: Spread
    cosine: float
    """Mean cosine between two different tokens of an input: 1 where all tokens have become the same."""


@dataclass(frozen=True)
class Attention:
    """The attention matrices A of one block, N x N for each head and input."""

    diagonal: float
    """Mean weight that a token gives to itself."""
    entropy: float
    """Mean entropy of a row over its largest: 1 where attention is uniform, 0 where each token looks at one."""
    frobenius: float
    """Mean Frobenius norm ..."""
    frobenius_bound: float
    """... which softmax keeps below sqrt(N)."""
    condition: Spread
    """Condition number over heads, of the first few inputs."""
    logit_range: float
    """Largest minus smallest logit of a row, over the temperature; the median over rows."""
    diagonal_margin: float
    """Logit of the token itself minus the largest of the others, over the temperature; the median over rows."""
    others_bound: float
    """What Proposition 1 of 2510.00345 lets others get at most: min(1, (N - 1) exp(-margin)), the mean over rows."""
    is_causal: bool
    """Whether no token looks at those after it."""


@dataclass(frozen=True)
class Weights:
    """Condition numbers of a block's weights, as y = x W has them."""

    query_key_heads: tuple[float, ...]
    """Of W_Q W_K^T of each head, on the head's rank."""
    value_output_heads: tuple[float, ...]
    query_key: float
    """Of the sum of W_Q W_K^T over heads ..."""
    value_output: float
    """... and of W_V W_O of the whole layer."""
    factors: tuple[float, ...]
    """Of W_Q, W_K and W_V themselves."""


@dataclass(frozen=True)
class Prediction:
    """What a paper expects of a block, beside what was measured: no bound to rely on."""

    source: str
    quantity: str
    relation: str
    """What the paper says about the measured number: "at most", "at least about", "about"."""
    predicted: float
    measured: float


@dataclass(frozen=True)
class BlockReport:
    """One block."""

    name: str
    cut: tuple[str, ...]
    """The skips it has lost."""
    tokens: dict[str, Tokens]
    """By stage, see STAGES; those its family has."""
    attention: Attention | None
    weights: Weights | None
    jacobians: dict[str, JacobianSpectrum]
    """Of "attention" and "mlp", for the first input and with respect to what they see, if asked for."""
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True)
class Diagnosis:
    """How a model treats a batch, block by block.

    `print` it for a table; `findings` says in words what is healthy and what is not.
    """

    model: str
    input_shape: tuple[int, ...]
    """Inputs, tokens, width."""
    blocks: tuple[BlockReport, ...]
    notes: tuple[str, ...]

    @property
    def findings(self) -> list[str]:
        """What is healthy and what is not, by rules of thumb."""
        from wellposed.diagnosis.findings import findings

        return findings(self)

    def __str__(self) -> str:
        inputs, tokens, width = self.input_shape
        parts = [f"{self.model}: {len(self.blocks)} blocks, {inputs} inputs of {tokens} tokens, {width} wide"]
        parts += [text_table(*self.table())]
        columns, rows = self.prediction_table()
        if rows:
            parts.append("What the papers predict, and what was measured (medians):")
            parts.append(text_table(columns, rows))
        parts.append("\n".join(f"* {line}" for line in (*self.findings, *self.notes)))
        return "\n\n".join(parts)

    def table(self, spreads: bool = False) -> tuple[list[str], list[list[str]]]:
        """Columns and rows of the measurements: a row per block, medians over the batch, with their tenths if asked."""
        cells = [_cells(block, spreads) for block in self.blocks]
        columns = list(dict.fromkeys(column for row in cells for column in row))
        return columns, [[row.get(column, "") for column in columns] for row in cells]

    def prediction_table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows of the predictions, a row per block: what is predicted, and what was measured."""
        kinds = list(dict.fromkeys((p.source, p.quantity) for block in self.blocks for p in block.predictions))
        rows = []
        for block in self.blocks:
            found = {
                (p.source, p.quantity): f"{p.relation} {short(p.predicted)}: {short(p.measured)}"
                for p in block.predictions
            }
            rows.append([block.name, *(found.get(kind, "") for kind in kinds)])
        return ["block", *(f"{source}: {quantity}" for source, quantity in kinds)], rows if kinds else []

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain lists, dictionaries and numbers."""
        plain: dict[str, Any] = asdict(self)
        for block, source in zip(plain["blocks"], self.blocks, strict=True):
            block["jacobians"] = {name: _plain(found) for name, found in source.jacobians.items()}
        return {**plain, "findings": self.findings}

    def to_json(self) -> str:
        """`to_dict` as JSON, where infinity is the string "Infinity"."""
        return json.dumps(_without_infinity(self.to_dict()), indent=1, allow_nan=False)

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Curves over the blocks as a matplotlib figure, also written to the picture file `path` if given."""
        return curves_figure(self.curves(), across=3, path=path)

    def curves(self) -> list[Curves]:
        """What `plot` and the page draw."""
        x = range(1, len(self.blocks) + 1)
        shown = [stage for stage in STYLES if stage in self.blocks[0].tokens]

        def of_tokens(stage: str, pick: Any) -> list[float]:
            return [drawable(pick(block.tokens[stage])) for block in self.blocks]

        curves = [
            Curves(title, [Line(stage, x, of_tokens(stage, pick), *STYLES[stage]) for stage in shown], "block", y, log)
            for title, y, log, pick in (
                ("tokens: condition number", "median over inputs", True, lambda t: t.condition.median),
                ("tokens: mean cosine", "mean over pairs", False, lambda t: t.cosine),
                ("tokens: stable rank", "median over inputs", False, lambda t: t.stable_rank.median),
            )
        ]
        attention = [block.attention for block in self.blocks if block.attention is not None]
        if len(attention) == len(self.blocks):
            values = {"to itself": [a.diagonal for a in attention], "entropy / largest": [a.entropy for a in attention]}
            values["norm / bound"] = [a.frobenius / a.frobenius_bound for a in attention]
            drawn = [
                Line(name, x, series, colour)
                for (name, series), colour in zip(values.items(), ("#228833", "#4477aa", "#ee6677"), strict=True)
            ]
            curves.append(Curves("attention", drawn, "block", "mean over heads", False))
        weights = [block.weights for block in self.blocks if block.weights is not None]
        if len(weights) == len(self.blocks):
            series = {
                "W_Q W_K^T, worst head": [drawable(max(w.query_key_heads)) for w in weights],
                "W_V W_O": [drawable(w.value_output) for w in weights],
            }
            drawn = [Line(name, x, y, c) for (name, y), c in zip(series.items(), ("#ee6677", "#4477aa"), strict=True)]
            curves.append(Curves("weights: condition number", drawn, "block", "", True))
        return curves


def _cells(block: BlockReport, spreads: bool) -> dict[str, str]:
    """What the table says about a block, by column."""

    def told(spread: Spread) -> str:
        differs = spreads and spread.low < spread.high
        around = f" ({short(spread.low)} to {short(spread.high)})" if differs else ""
        return short(spread.median) + around

    cells = {"block": block.name}
    cells |= {f"cond. {stage}": told(block.tokens[stage].condition) for stage in STAGES if stage in block.tokens}
    out = block.tokens["output"]
    cells |= {"cosine": f"{out.cosine:.3f}", "stable rank": told(out.stable_rank)}
    if block.attention is not None:
        seen = block.attention
        cells |= {"A diag.": f"{seen.diagonal:.3f}", "A entropy": f"{seen.entropy:.3f}"}
        cells["|A|_F / bound"] = f"{seen.frobenius:.2f} / {seen.frobenius_bound:.2f}"
        cells["cond. A"] = told(seen.condition)
    if block.weights is not None:
        heads = block.weights.query_key_heads
        cells["cond. W_Q W_K^T, heads"] = f"{short(min(heads))} to {short(max(heads))}"
        cells["cond. W_V W_O"] = short(block.weights.value_output)
    for part, found in block.jacobians.items():
        condition = f"{'' if found.is_exact else '> '}{short(found.condition_number)}"
        cells[f"Jacobian of {part}: largest, cond."] = f"{short(float(found.largest[0]))}, {condition}"
    return cells


def short(value: float) -> str:
    """A number in at most five characters or so."""
    if math.isinf(value):
        return "inf"
    return f"{value:.3g}" if 0.01 <= value < 1e4 or value == 0 else f"{value:.1e}"


def drawable(value: float, most: float = 1e7) -> float:
    """`value`, with infinity at the top of the picture."""
    return min(value, most)


def _plain(spectrum: JacobianSpectrum) -> dict[str, Any]:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in vars(spectrum).items()} | {
        "condition_number": spectrum.condition_number
    }


def _without_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinity(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_infinity(item) for item in value]
    return str(value).replace("inf", "Infinity") if isinstance(value, float) and not math.isfinite(value) else value
