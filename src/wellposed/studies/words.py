"""What the table of a study says, in words that follow its numbers."""

from collections.abc import Mapping
from statistics import mean
from typing import TYPE_CHECKING

from wellposed.studies.chance import judged, pooled

if TYPE_CHECKING:
    from wellposed.studies.comparison import StudyResult

TITLES = {"adamw": "AdamW", "soap": "SOAP"}
MARGIN = 0.02
"""Accuracies that are nearer to each other than this are called the same."""
_WAYS = {1: "one way", 2: "two ways", 3: "three ways", 4: "four ways"}


def lead(result: "StudyResult") -> str:
    """The first paragraph of the page."""
    config = result.config
    ways = _WAYS.get(len(config.compared), f"{len(config.compared)} ways")
    first = f"{config.model} on {config.data.partition(':')[0]}, trained {ways} for {config.epochs} epochs. "
    return first + config.described.words(result)


def on_conditioning(result: "StudyResult") -> str:
    """With skips, without, and without but conditioned."""
    reached = _best(result)
    if not reached.keys() >= {"skip", "skipless", "conditioned"}:
        return _listed(result)
    first = f"With its skip connections it {_reaches(reached['skip'])}. "
    skipless, conditioned = (f"{100 * reached[kind]:.1f} %" for kind in ("skipless", "conditioned"))
    gap = reached["conditioned"] - reached["skipless"]
    if gap > MARGIN:
        return first + (
            f"With all of them cut, its default initialization gets to {skipless}; started from "
            f"well-conditioned weights, the very same network without skips reaches {conditioned}."
        )
    compared = "less far than" if gap < -MARGIN else "as far as"
    return first + (
        f"With all of them cut it reaches {skipless} from its default initialization and {conditioned} from "
        f"well-conditioned weights, {compared} by default."
    )


def on_skips(result: "StudyResult") -> str:
    """With its skips, without those around attention, without those around the MLP, without any."""
    reached = _best(result)
    if reached.keys() == {"all", "none"}:
        return f"With its skips it {_reaches(reached['all'])}, without them it {_reaches(reached['none'])}: " + (
            f"{_change(reached, 'none')} points."
        )
    if not reached.keys() >= {"all", "no-attention", "no-mlp", "none"}:
        return _listed(result)
    gap = reached["no-mlp"] - reached["no-attention"]
    verdict = "attention needs its skips more" if gap > MARGIN else "the MLP needs its skips more"
    return (
        f"With its skips it {_reaches(reached['all'])}; without any it {_reaches(reached['none'])}. Cutting "
        f"attention's alone changes its accuracy by {_change(reached, 'no-attention')} points, cutting the MLP's alone "
        f"by {_change(reached, 'no-mlp')}: {verdict if abs(gap) > MARGIN else 'about the same'}."
    )


def on_graying(result: "StudyResult") -> str:
    """Without graying, and with several kinds of it."""
    reached = _best(result)
    grayed = {kind: accuracy for kind, accuracy in reached.items() if kind != "plain"}
    if "plain" not in reached or not grayed:
        return _listed(result)
    best = max(grayed, key=lambda kind: grayed[kind])
    gain = grayed[best] - reached["plain"]
    verdict = "better" if gain > MARGIN else "worse" if gain < -MARGIN else "no difference that one could be sure of"
    return (
        f"Without graying it {_reaches(reached['plain'])}; of the grayed ones "
        f"{result.config.described.kind(best).name} does best and {_reaches(grayed[best])}: {verdict}."
    )


def on_attention(result: "StudyResult") -> str:
    """With softmax, and with functions of each logit alone in its place."""
    reached = _best(result)
    if not reached.keys() >= {"softmax", "degree-3"}:
        return _listed(result)
    gap = reached["degree-3"] - reached["softmax"]
    verdict = "more" if gap > MARGIN else "less" if gap < -MARGIN else "no difference that one could be sure of"
    first = (
        f"With softmax it {_reaches(reached['softmax'])}; with its logits to the third power, over the square root of "
        f"the number of keys, it {_reaches(reached['degree-3'])}: {verdict}."
    )
    if "unscaled" not in reached:
        return first
    return f"{first} Without that scale it {_reaches(reached['unscaled'])}."


def on_low_rank(result: "StudyResult") -> str:
    """At full rank, and at each rank with a sine and without, under the optimizer that does best at full rank."""
    optimizers = {o: values for o in result.config.optimizers if (values := result.accuracies("full", o))}
    chosen = max(optimizers, key=lambda o: mean(optimizers[o]), default=result.config.optimizers[0])
    found = {kind.key: result.accuracies(kind.key, chosen) for kind in result.config.compared}
    chance = pooled(found.values())
    told = []
    for rank in result.config.ranks:
        plain, sine = found.get(f"plain-{rank}"), found.get(f"sine-{rank}")
        if plain and sine:
            gap = 100 * (mean(sine) - mean(plain))
            told.append(
                f"at rank {rank}, {100 * mean(plain):.1f} % without the sine and {100 * mean(sine):.1f} with it "
                f"({gap:+.1f}{'' if chance is None else ', ' + judged(sine, plain, chance)})"
            )
    if not told:
        return _listed(result)
    whole = f"With MLPs of full rank it {_reaches(mean(found['full']))}" if found.get("full") else "With low-rank MLPs"
    unsure = (
        "One seed each: how much of a difference is chance, these runs do not say."
        if chance is None
        else "In brackets the difference in points, and whether seeds alone would make it one time in twenty."
    )
    return f"{whole}, under {TITLES[chosen]}: {'; '.join(told)}. {unsure}"


def _best(result: "StudyResult") -> dict[str, float]:
    """Of each kind, the mean over seeds under the optimizer that does best; 0 if every run diverged."""
    return {
        kind.key: max((mean(v) for o in result.config.optimizers if (v := result.accuracies(kind.key, o))), default=0.0)
        for kind in result.config.compared
    }


def _listed(result: "StudyResult") -> str:
    """The table as a sentence, for a part of the kinds."""
    return "; ".join(f"{name}: {' and '.join(cells)}" for name, *cells in result.rows()) + "."


def _reaches(accuracy: float) -> str:
    return f"reaches {100 * accuracy:.1f} %" if accuracy else "diverges"


def _change(reached: Mapping[str, float], kind: str) -> str:
    return f"{100 * (reached[kind] - reached['all']):+.1f}"
