"""What a study of adapters says, in words that follow its numbers."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING

from wellposed.studies.chance import Chance, is_sure, judged, pooled

if TYPE_CHECKING:
    from wellposed.studies.adapter_config import AdapterStudy
    from wellposed.studies.adapter_result import Trained


def lead(config: "AdapterStudy", models: Sequence["Trained"]) -> str:
    """The first paragraph of the page: who is ahead at each rank, sine against LoRA, and what the control explains."""
    chance = pooled(each.means for each in models if each.points)
    told = [_setting(config, models)]
    for rank in config.ranks:
        own = {each.method: each.means for each in models if each.rank == rank and each.points}
        names = {each.method: each.name for each in models}
        if own:
            told += _at_rank(rank, own, names, chance)
    told += _stable_ranks(models)
    told.append(_on_chance(config, chance))
    return " ".join(told)


def _setting(config: "AdapterStudy", models: Sequence["Trained"]) -> str:
    tests = max((list(each.points) for each in models), key=len, default=[])
    over = f"the mean over {', '.join(tests)}" if len(tests) > 1 else f"those on {', '.join(tests) or 'nothing'}"
    seeds = f"{config.seeds} seeds" if config.seeds > 1 else "one seed"
    lost = [f"{each.name} at rank {each.rank}" for each in models if not each.points]
    diverged = f" {', '.join(lost)} diverged with every seed." if lost else ""
    return f"{config.model.rstrip('/').rpartition('/')[2]}, {seeds}; scores are {over}, in points of 100.{diverged}"


def _at_rank(rank: int, own: Mapping[str, list[float]], names: Mapping[str, str], chance: Chance | None) -> list[str]:
    order = sorted(own, key=lambda method: -mean(own[method]))
    best = order[0]
    told = [f"At rank {rank}, {names[best]} does best with {mean(own[best]):.1f}"]
    if len(order) > 1:
        rivals = [names[method] for method in order[1:] if not is_sure(own[best], own[method], chance)]
        level = f"; seeds alone could put {', '.join(rivals)} first instead" if rivals and chance is not None else ""
        told[0] += f"; last is {names[order[-1]]} with {mean(own[order[-1]]):.1f}{level}"
    told[0] += "."
    if not {"sine", "lora"} <= own.keys():
        return told
    gain = mean(own["sine"]) - mean(own["lora"])
    sentence = f"SineLoRA against LoRA: {gain:+.1f} points"
    told.append(f"{sentence}{'' if chance is None else ', ' + judged(own['sine'], own['lora'], chance)}.")
    if "lora-control" in own:
        told.append(_on_control(own["sine"], own["lora"], own["lora-control"], chance))
    return told


def _on_control(sine: list[float], lora: list[float], control: list[float], chance: Chance | None) -> str:
    """Whether LoRA with the scale of the sine adapter does what the sine adapter does."""
    numbers = (
        "From LoRA to LoRA with its alpha times omega/g, which is SineLoRA to first order, it is "
        f"{mean(control) - mean(lora):+.1f} points, and from there to SineLoRA {mean(sine) - mean(control):+.1f}"
    )
    if chance is None:
        return f"{numbers}."
    if not is_sure(sine, lora, chance):
        end = "there is no sure gain to explain"
        if is_sure(sine, control, chance):
            end += f", but at the same scale the sine does {'better' if mean(sine) > mean(control) else 'worse'}"
    elif is_sure(sine, control, chance):
        above = mean(sine) > mean(control)
        end = (
            "the scale alone does not explain the difference" if above else "the scale alone does better than the sine"
        )
    else:
        end = "the scale alone explains the difference, as far as these seeds can tell"
    return f"{numbers}: {end}."


def _stable_ranks(models: Sequence["Trained"]) -> list[str]:
    found = {(each.method, each.rank): mean(each.stable_ranks) for each in models if each.stable_ranks}
    both = [rank for method, rank in found if method == "sine" and ("lora", rank) in found]
    if not both:
        return []
    numbers = [f"{found['sine', rank]:.1f} against {found['lora', rank]:.1f} at rank {rank}" for rank in both]
    stds = [each.argument_stds for each in models if each.method == "sine" and each.argument_stds]
    bent = f"; std(omega B A) comes to {', '.join(f'{mean(each):.2f}' for each in stds)}" if stds else ""
    return [f"The stable rank of SineLoRA's updates and of LoRA's: {', '.join(numbers)}{bent}."]


def _on_chance(config: "AdapterStudy", chance: Chance | None) -> str:
    if chance is None:
        return "With one seed, how much of a difference is chance cannot be said."
    margin = chance.margin(config.seeds, config.seeds)
    return (
        f"Means over {config.seeds} seeds are told apart from {margin:.1f} points on (95 %, Student's t; the spread "
        f"over seeds is pooled over all methods and ranks, {chance.freedom} degrees of freedom)."
    )
