"""Images, shapes and scenes from a handful of parameters: coordinate networks with sine low-rank layers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wellposed.fields.image_config import ImageConfig as ImageConfig
from wellposed.fields.nerf_config import NerfConfig as NerfConfig
from wellposed.fields.occupancy_config import OccupancyConfig as OccupancyConfig

if TYPE_CHECKING:
    from wellposed.fields.files import load as load
    from wellposed.fields.image import fit_image as fit_image
    from wellposed.fields.image import render_image as render_image
    from wellposed.fields.layers import field_linear as field_linear
    from wellposed.fields.nerf import load_nerf as load_nerf
    from wellposed.fields.nerf_fitting import fit_nerf as fit_nerf
    from wellposed.fields.networks import CoordinateNetwork as CoordinateNetwork
    from wellposed.fields.occupancy import fit_occupancy as fit_occupancy
    from wellposed.fields.results import FieldResult as FieldResult

_HOMES = {
    "CoordinateNetwork": "networks",
    "FieldResult": "results",
    "field_linear": "layers",
    "fit_image": "image",
    "fit_nerf": "nerf_fitting",
    "fit_occupancy": "occupancy",
    "load": "files",
    "load_nerf": "nerf",
    "render_image": "image",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wellposed.fields' has no attribute {name!r}")
    # Now, and not before: the command line asks for the settings alone.
    return getattr(import_module(f"wellposed.fields.{_HOMES[name]}"), name)
