"""Seeing early that a run of DINO collapses, and what to do about it.

A collapsed teacher says the same of every image: all K outputs alike, or one of them alone. Either way its outputs tell
nothing about the image (`information` 0), the student has nothing to learn (KL 0), and sooner or later all features are
the same (`std` 0). Every run passes near that state: first it forgets all that two views of an image do not share, then
what they do share grows, by a factor for every time that the teacher takes to follow. So a sign counts only once it
lasts for several such times, and begins to count anew where the information has grown.
"""

from dataclasses import asdict, dataclass
from typing import Any

from wellposed.training.task import Remark

LEAST_INFORMATION = 0.01
"""In nats; on digits, runs that learn pass through 0.02 to 0.05, and those that collapse fall to 0.002 and less."""
EVEN = 0.9
"""Of log K: an entropy above it is that of outputs which are all alike."""
LEAST_STD = 0.005
"""Of features of length sqrt(D)."""
WARN_AFTER, STOP_AFTER = 0.02, 0.1
"""How long a sign lasts until it is spoken of, and until the run is lost, as parts of the whole run."""
FEWEST_STEPS = (20, 100)
"""The least that these are, in steps."""
TEACHER_TIMES = 6
"""The least that the second is, in times 1 / (1 - momentum) in which the teacher follows; on digits information doubles
in three of them."""
GROWTH, NOISE = 2.0, 1e-4
"""Information that has grown by this factor, from more than so little, is a sign of recovery."""


@dataclass
class Watch:
    """Judges a run of `steps` steps by the numbers it reports."""

    steps: int
    momentum: float = 0.0
    """Of the teacher, at the first step."""
    stops: bool = True
    """End a run that is lost, or only warn."""
    since: int | None = None
    """The step of the last report without the signs that are there now."""
    still: int = 0
    """That step, or the last at which the information had grown."""
    lowest: float = 0.0
    """The least information since then."""
    seen: int = 0
    """The step of the last report."""
    spoken: bool = False

    def judge(self, step: int, values: dict[str, float]) -> Remark | None:
        """What is to be said about the numbers after `step` steps."""
        before, self.seen = self.seen, step
        sign = sign_of_collapse(values)
        if sign is None:
            self.since, self.spoken = None, False
            return None
        information = max(values["information"], NOISE)
        if self.since is None:
            self.since, self.still, self.lowest = before, before, information
        if information >= GROWTH * self.lowest:
            self.still, self.lowest = step, information
        self.lowest = min(self.lowest, information)
        lasting = step - self.since
        if self.stops and step - self.still >= self._patience():
            advice = "If it is not lost, --resume --collapse warn goes on with it"
            return Remark(f"the run has collapsed: for {lasting} steps, {sign}. {advice}", lost=True)
        if self.spoken or lasting < max(FEWEST_STEPS[0], WARN_AFTER * self.steps):
            return None
        self.spoken = True
        return Remark(f"the run may be collapsing: for {lasting} steps, {sign}")

    def _patience(self) -> float:
        following = TEACHER_TIMES / max(1 - self.momentum, 1 / self.steps)
        return max(FEWEST_STEPS[1], STOP_AFTER * self.steps, following)

    def state_dict(self) -> dict[str, Any]:
        """What the next judgement depends on."""
        return {name: value for name, value in asdict(self).items() if name not in {"steps", "momentum", "stops"}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, value)


def sign_of_collapse(values: dict[str, float]) -> str | None:
    """What in the reported numbers looks like a collapse, with what to try; None if nothing does.

    Args:
        values: `entropy` of the teacher as a part of log K, `information` in nats, `kl`, and `std` of the features.
    """
    if values["std"] < LEAST_STD:
        return (
            f"all images have the same features (standard deviation {values['std']:.1g}). Try a lower --lr, a longer "
            "--warmup-epochs, or, without skips, --init conditioned"
        )
    if values["information"] >= LEAST_INFORMATION:
        return None
    if values["entropy"] > EVEN:
        return (
            f"the teacher's outputs are all alike (entropy {values['entropy']:.4f} of log K, KL {values['kl']:.1g}). "
            "Try a lower --teacher-temp or --teacher-temp-start, a --momentum nearer to 1, or a lower --lr"
        )
    return (
        f"the teacher says the same of every image (entropy {values['entropy']:.4f} of log K, information "
        f"{values['information']:.1g} nats). Try a lower --center-momentum, a --momentum nearer to 1, a lower --lr or "
        "a larger --out-dim"
    )
