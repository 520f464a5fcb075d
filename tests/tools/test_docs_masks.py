"""The pictures of docs/masks.md are of the masks above them."""

from __future__ import annotations

import html
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .test_readme import ROOT

_SPEC = importlib.util.spec_from_file_location("draw_masks", ROOT / "docs" / "draw_masks.py")
assert _SPEC is not None and _SPEC.loader is not None
draw_masks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(draw_masks)

PAGE = draw_masks.PAGE.read_text(encoding="utf-8")
MARKED = re.findall(r"^<!-- picture: (\w+) =", PAGE, re.MULTILINE)
SHOWN = re.findall(r"\(pictures/masks/(\w+)\.svg\)", PAGE)


@pytest.fixture(scope="module")
def pictures() -> dict[str, Any]:
    return {picture.name: picture for picture in draw_masks.pictures(PAGE)}


# ------------------------------------------------------------------------------------------- pictures
def test_every_picture_is_asked_for_and_shown_once(pictures: dict[str, Any]) -> None:
    assert MARKED == SHOWN == list(pictures)
    assert len(set(MARKED)) == len(MARKED) > 20
    assert {path.name for path in draw_masks.FOLDER.iterdir()} == {f"{name}.svg" for name in SHOWN}


@pytest.mark.parametrize("name", SHOWN)
def test_the_stored_picture_is_of_the_mask_on_the_page(name: str, pictures: dict[str, Any]) -> None:
    text = (draw_masks.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert html.escape(pictures[name].description, quote=False) in text, "run python docs/draw_masks.py"
    assert len(text) < 60_000
    assert "<image" not in text and "dc:date" not in text


@pytest.mark.parametrize("name", SHOWN)
def test_a_picture_shows_its_mask(name: str, pictures: dict[str, Any]) -> None:
    picture = pictures[name]
    mask, batch, head = picture.mask, picture.options.get("batch", 0), picture.options.get("head", 0)
    allowed = mask.to_dense().reshape(*mask.heads, *mask.shape)[batch, head]
    (ax,) = draw_masks.draw(picture).axes
    (S_q, S_k), (bq, bk) = mask.shape, mask.block
    places = np.stack(np.meshgrid(np.arange(S_k), np.arange(S_q)), axis=2).reshape(-1, 2) + 0.5
    drawn = {p.get_label(): p.get_path().contains_points(places).reshape(mask.shape) for p in ax.patches}
    np.testing.assert_array_equal(drawn["whole block"] | drawn["seen of it"], allowed)
    for top in range(0, S_q, bq):
        for left in range(0, S_k, bk):
            block = slice(top, top + bq), slice(left, left + bk)
            whole, some = allowed[block].all(), allowed[block].any()
            assert (drawn["whole block"][block] == whole).all()
            assert (drawn["block in part"][block] == (some and not whole)).all()


@pytest.mark.long
def test_drawing_gives_the_same_files_every_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw_masks.main(["--folder", str(tmp_path / "first")])
    assert {path.stem for path in (tmp_path / "first").glob("*.svg")} == set(MARKED)
    some = [MARKED[0], MARKED[-1]]
    draw_masks.main(["--folder", str(tmp_path / "second"), *some])
    for name in some:
        first, second = ((tmp_path / folder / f"{name}.svg").read_bytes() for folder in ("first", "second"))
        assert first == second
    assert len(capsys.readouterr().out.splitlines()) == len(MARKED) + 2


def test_a_name_without_a_picture_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="got nonsense"):
        draw_masks.main(["--folder", str(tmp_path), "nonsense"])
    assert not list(tmp_path.iterdir())


def test_pictures_are_of_the_code_above_them() -> None:
    page = "\n".join(
        [
            "```python",
            "import bsrgemm as bg",
            "mask = bg.BlockMask.full(32, block=16, device='cpu')",
            "```",
            "<!-- picture: a = mask -->",
            "<!-- needs a GPU -->",
            "```python",
            "mask = None",
            "```",
            "```python",
            ">>> 1 / 0",
            "Traceback (most recent call last):",
            "    ...",
            "ZeroDivisionError: division by zero",
            ">>> mask = bg.BlockMask.causal(32, block=16, device='cpu')",
            "```",
            "<!-- picture: b = mask, head=0 -->",
        ]
    )
    a, b = draw_masks.pictures(page)
    assert (a.name, a.mask.allowed, a.legend) == ("a", 32 * 32, True)
    assert (b.name, b.mask.allowed, b.options, b.legend) == ("b", 32 * 33 // 2, {"head": 0}, False)
    assert a.description != b.description
