"""What a diagnosis means, in words. The thresholds are rules of thumb, not theorems."""

import math
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wellposed.diagnosis.report import BlockReport, Diagnosis

PARALLEL = 0.95
UNIFORM = 0.98
ILL_CONDITIONED = 1e3


def findings(report: "Diagnosis") -> list[str]:
    """One sentence for each thing there is to say."""
    sentences = [_tokens(report), *_conditions(report), *_sub_blocks(report), *_attention(report), *_weights(report)]
    return [sentence for sentence in sentences if sentence]


def _tokens(report: "Diagnosis") -> str:
    if report.input_shape[1] == 1:
        return "There is one token only: nothing can be said about how tokens differ."
    alike = _where(report, lambda block: block.tokens["output"].cosine > PARALLEL)
    if not alike:
        most = max(block.tokens["output"].cosine for block in report.blocks)
        return f"Healthy: tokens stay apart; the mean cosine between them is {most:.2f} at most."
    remedy = (
        "Without skips this is to be expected: in the first blocks of a default initialization, later after "
        "wp.condition_, with which a model learns all the same."
        if any(block.cut for block in report.blocks)
        else "The model keeps its skips, so look at the inputs first: do their tokens differ at all?"
    )
    first = next(i for i, block in enumerate(report.blocks) if block.tokens["output"].cosine > PARALLEL)
    return (
        f"{'Unhealthy' if first < len(report.blocks) / 2 else 'To watch'}: tokens have become nearly the same (mean "
        f"cosine above {PARALLEL:g}) in {alike}; what tells them apart is all but lost there. {remedy}"
    )


def _conditions(report: "Diagnosis") -> list[str]:
    singular = _where(report, lambda block: math.isinf(block.tokens["output"].condition.median))
    if singular:
        return [f"Tokens are singular, as far as their precision tells, after {singular}."]
    typical = [block.tokens["output"].condition.median for block in report.blocks]
    return [f"The condition number of a block's tokens goes from {min(typical):.3g} to {max(typical):.3g}."]


def _sub_blocks(report: "Diagnosis") -> list[str]:
    """Figure 1b of Always Skip Attention: attention's output against the MLP's."""
    if "mlp" not in report.blocks[0].tokens:
        return []
    pairs = [tuple(b.tokens[name].condition.median for name in ("attention", "mlp")) for b in report.blocks]
    finite = [(math.log(attention), math.log(mlp)) for attention, mlp in pairs if max(attention, mlp) < math.inf]
    worse = sum(attention > mlp for attention, mlp in pairs)
    sentence = f"What attention gives is worse conditioned than what the MLP gives in {worse} of {len(pairs)} blocks"
    if finite:
        attention, mlp = (median(pair[i] for pair in finite) for i in (0, 1))
        sentence += f" (typically e^{attention:.1f} against e^{mlp:.1f}, where both are finite)"
    sentences = [f"{sentence}, before either meets its skip."]
    kept = [block for block in report.blocks if "attention" not in block.cut and "after attention" in block.tokens]
    helped = sum(b.tokens["after attention"].condition.median < b.tokens["attention"].condition.median for b in kept)
    if kept:
        sentences.append(f"The skip around attention improves the condition number in {helped} of {len(kept)} blocks.")
    return sentences


def _attention(report: "Diagnosis") -> list[str]:
    if not any(block.attention for block in report.blocks) or report.input_shape[1] == 1:
        return []
    uniform = _where(report, lambda block: block.attention is not None and block.attention.entropy > UNIFORM)
    if uniform:
        return [
            f"To watch: attention is nearly uniform (entropy above {UNIFORM:g} of its maximum) in {uniform}; it "
            "averages all tokens, which makes them alike. Usual at a default initialization."
        ]
    return ["Healthy: attention is uniform in no block."]


def _weights(report: "Diagnosis") -> list[str]:
    if not any(block.weights for block in report.blocks):
        return []
    bad = _where(report, lambda block: block.weights is not None and block.weights.value_output > ILL_CONDITIONED)
    if bad:
        return [
            f"To watch: W_V W_O is ill conditioned (above {ILL_CONDITIONED:g}) in {bad}. With skips this is common and "
            "harmless; without them it bounds what a block lets through."
        ]
    return [f"Healthy: W_V W_O has a condition number below {ILL_CONDITIONED:g} in every block."]


def _where(report: "Diagnosis", holds: Callable[["BlockReport"], bool]) -> str:
    """The blocks for which something holds, as "blocks 3 to 5 and 9 of 12"; empty if none."""
    numbers = [number for number, block in enumerate(report.blocks, start=1) if holds(block)]
    if not numbers:
        return ""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{'block' if len(numbers) == 1 else 'blocks'} {listed} of {len(report.blocks)}"
