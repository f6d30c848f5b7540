"""wellposed fit: coordinate networks with full-rank, low-rank or sine layers."""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import tyro
from tyro.extras import SubcommandApp

from wellposed.cli import fit_nerf
from wellposed.cli.runs_named import given_fields, named_default
from wellposed.fields.image_config import ImageConfig
from wellposed.fields.occupancy_config import OccupancyConfig

Kind = Literal["full", "low-rank", "sine"]
ConfigFile = Annotated[str | None, tyro.conf.arg(metavar="FILE")]


def app(argv: Sequence[str]) -> SubcommandApp:
    """The commands; their flags default to what the file or the run that `argv` names has for them."""
    commands = SubcommandApp()
    commands.command(_image(argv))
    commands.command(_occupancy(argv))
    commands.command(fit_nerf.command(argv))
    return commands


def _image(argv: Sequence[str]) -> Callable[..., None]:
    default = named_default(ImageConfig, "fit image", argv)

    def image(
        options: ImageConfig = default,
        kinds: tuple[Kind, ...] = (),
        ranks: tuple[int, ...] = (),
        jobs: int = 1,
        config: ConfigFile = None,
    ) -> None:
        """Fit a network to a picture: PSNR, SSIM, a PNG, and a weights file whose size is the point.

        Args:
            options: what to fit.
            kinds: fit once for each of these and of --ranks, and compare them in report.html and table.md.
            ranks: of the low-rank and sine layers that are compared; 1 5 10 20 30 with --kinds alone.
            jobs: how many of these are fitted at a time, in processes of their own.
            config: a .toml or .json file of these settings, which flags then override.
        """
        from wellposed.fields.image import fit_image
        from wellposed.studies.field_ranks import fit_or_compare

        fit_or_compare(options, fit_image, given_fields(options, default), kinds, ranks, jobs)

    return image


def _occupancy(argv: Sequence[str]) -> Callable[..., None]:
    default = named_default(OccupancyConfig, "fit occupancy", argv)

    def occupancy(
        options: OccupancyConfig = default,
        kinds: tuple[Kind, ...] = (),
        ranks: tuple[int, ...] = (),
        jobs: int = 1,
        config: ConfigFile = None,
    ) -> None:
        """Fit a network to the inside of a mesh: IoU on a grid, and a mesh of it again.

        Args:
            options: what to fit.
            kinds: fit once for each of these and of --ranks, and compare them in report.html and table.md.
            ranks: of the low-rank and sine layers that are compared; 1 5 10 20 30 with --kinds alone.
            jobs: how many of these are fitted at a time, in processes of their own.
            config: a .toml or .json file of these settings, which flags then override.
        """
        from wellposed.fields.occupancy import fit_occupancy
        from wellposed.studies.field_ranks import fit_or_compare

        fit_or_compare(options, fit_occupancy, given_fields(options, default), kinds, ranks, jobs)

    return occupancy
