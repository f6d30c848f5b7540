"""Two pictures in one place, with a handle that uncovers one of them: before and after."""

import base64
import io
from html import escape
from pathlib import Path

_LARGEST = 1024
_WHOLE_STYLE = "display: block; width: 100%; height: auto"
_UPPER_STYLE = "position: absolute; inset: 0; width: 100%; height: 100%; clip-path: inset(0 calc(100% - var(--at)) 0 0)"
_EDGE_STYLE = (
    "position: absolute; top: 0; bottom: 0; left: var(--at); width: 2px; background: #fff; mix-blend-mode: difference"
)


def slider_panel(title: str, left: tuple[str, Path], right: tuple[str, Path]) -> str:
    """A panel with the pictures of two files of one size over one another, the first to the left of the handle.

    Works by mouse, touch and keyboard, loads nothing, and shows half of each where there is no JavaScript.

    Args:
        title: of the panel.
        left: name and file of a picture.
        right: name and file of the other.
    """
    (left_name, left_file), (right_name, right_file) = left, right
    moved = "this.parentNode.style.setProperty('--at', this.value + '%')"
    label = escape(f"{title}: {left_name} or {right_name}", quote=True)
    return (
        f'<figure style="margin: 0; --at: 50%"><figcaption><b>{escape(title)}</b></figcaption>'
        f'<div style="position: relative">'
        f'<img src="{_link(right_file)}" alt="{escape(right_name, quote=True)}" style="{_WHOLE_STYLE}">'
        f'<img src="{_link(left_file)}" alt="{escape(left_name, quote=True)}" style="{_UPPER_STYLE}">'
        f'<div style="{_EDGE_STYLE}"></div></div>'
        f'<input type="range" min="0" max="100" value="50" aria-label="{label}" oninput="{moved}" '
        f'style="width: 100%; margin: .3rem 0 0">'
        f'<div style="display: flex; justify-content: space-between; gap: 1rem"><small>{escape(left_name)}</small>'
        f'<small style="text-align: right">{escape(right_name)}</small></div></figure>'
    )


def _link(path: Path) -> str:
    """The picture as a link that holds it, no larger than a page can show."""
    from PIL import Image

    file = io.BytesIO()
    with Image.open(path) as picture:
        small = picture.convert("RGB")
        small.thumbnail((_LARGEST, _LARGEST), Image.Resampling.LANCZOS)
        kind = "PNG" if max(small.size) <= 256 else "JPEG"
        small.save(file, kind, **({} if kind == "PNG" else {"quality": 92, "subsampling": 0}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
