"""wellposed fit: coordinate networks with full-rank, low-rank or sine layers."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any, Literal

import tyro
from tyro.extras import SubcommandApp

from wellposed.cli.runs_named import given_fields, named_default
from wellposed.fields import ImageConfig, NerfConfig, OccupancyConfig
from wellposed.fields.config import FieldConfig

Kind = Literal["full", "low-rank", "sine"]
_FIELDS: dict[type[FieldConfig], str] = {
    ImageConfig: "Fit a network to a picture: PSNR, SSIM, a PNG, and a weights file whose size is the point.",
    OccupancyConfig: "Fit a network to the inside of a mesh: IoU on a grid, and a mesh of it again.",
    NerfConfig: "Fit a network to a scene: PSNR and SSIM on held-out views, a turntable, and a weights file.",
}


def app(argv: Sequence[str]) -> SubcommandApp:
    """The commands; their flags default to what the file or the run that `argv` names has for them."""
    commands = SubcommandApp()
    for kind, what in _FIELDS.items():
        commands.command(name=kind.name, help=what)(_command(kind, argv))
    return commands


def _command(kind: type[FieldConfig], argv: Sequence[str]) -> Callable[..., None]:
    default: Any = named_default(kind, f"fit {kind.name}", argv)

    def fit(
        options: kind = default,  # type: ignore[valid-type]
        kinds: tuple[Kind, ...] = (),
        ranks: tuple[int, ...] = (),
        jobs: int = 1,
        config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    ) -> None:
        """Fit a field.

        Args:
            options: what to fit.
            kinds: fit once for each of these and of --ranks, and compare them in report.html and table.md.
            ranks: of the low-rank and sine layers that are compared; 1 5 10 20 30 with --kinds alone.
            jobs: how many of these are fitted at a time, in processes of their own.
            config: a .toml or .json file of these settings, which flags then override.
        """
        from wellposed.studies.field_ranks import fit_or_compare

        function = getattr(import_module("wellposed.fields"), f"fit_{kind.name}")
        fit_or_compare(options, function, given_fields(options, default), kinds, ranks, jobs)

    return fit
