"""Choosing layers by name, in the way of PEFT's target_modules."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from wellposed.errors import InvalidArgumentError

ALL = "all-linear"


def is_target(name: str, targets: str | Iterable[str]) -> bool:
    r"""Whether a layer's full name is meant: by a regular expression for all of it, or by an end of it in a list.

    Example:
        >>> is_target("blocks.0.mlp.fc1", ["mlp.fc1"]), is_target("blocks.0.mlp.fc1", r"blocks\.\d+\.mlp\..*")
        (True, True)
        >>> is_target("blocks.0.mlp.fc1", ["c1"]), is_target("blocks.0.mlp.fc1", "fc1")
        (False, False)
    """
    if isinstance(targets, str):
        return targets == ALL or re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def check_targets(targets: str | Sequence[str]) -> None:
    """InvalidArgumentError unless `targets` is a regular expression or names."""
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            raise InvalidArgumentError(f"targets={targets!r} is not a regular expression: {error}") from error
    elif not targets or not all(isinstance(target, str) and target for target in targets):
        raise InvalidArgumentError(f"targets={targets!r}: expected ends of names, a regular expression or {ALL!r}")


def close_names(targets: str | Iterable[str], names: Sequence[str]) -> list[str]:
    """What of the names in `names`, or of their ends, looks like one of `targets`; the closest first, six at most.

    Example:
        >>> close_names(["q_porj"], ["layers.0.q_proj", "layers.1.q_proj", "layers.0.up"])
        ['q_proj']
    """
    ends: dict[str, None] = {}
    for name in names:
        *before, last = name.split(".")
        ends |= dict.fromkeys([last, f"{before[-1]}.{last}"] if before and not before[-1].isdigit() else [last])
    given = [targets] if isinstance(targets, str) else sorted(targets)
    found = [close for target in given for close in get_close_matches(target, ends, n=3, cutoff=0.6)]
    return list(dict.fromkeys(found))[:6]


def none_of(targets: str | Iterable[str], names: Sequence[str]) -> str:
    """The end of a message that `targets` match none of `names`: the close ones, or else some that there are."""
    close = close_names(targets, names)
    if close:
        return f"Close names: {', '.join(close)}."
    ends = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))
    return f"There are: {', '.join(ends[:12])}{', ...' if len(ends) > 12 else ''}." if ends else "There are none."
