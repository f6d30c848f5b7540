"""What the README shows, run as a reader would run it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.splitlines()[0])
def test_python_blocks(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})


def test_there_are_blocks_and_their_links_exist() -> None:
    assert len(BLOCKS) == 11
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    headings = {
        f"#{heading.lower().replace(' ', '-')}" for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    }
    links = re.findall(r"\]\((?!http)(.*?)\)", text)
    assert links
    assert all(link in headings if link.startswith("#") else (ROOT / link).exists() for link in links)
