"""The pictures of docs/linear-examples.md: each is asked for, shown and drawn. test_docs.py runs the examples."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def drawing() -> Any:
    spec = importlib.util.spec_from_file_location("draw_examples", ROOT / "docs" / "draw_examples.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_picture_is_there_and_shown_where_it_is_made(drawing: Any) -> None:
    page = drawing.PAGE.read_text(encoding="utf-8")
    wanted = drawing.names(page)
    assert len(wanted) == page.count("\n## ") == 5
    assert re.findall(r"<!-- picture: (\w+) -->\n!\[[^\]]+\]\(pictures/examples/(\w+)\.png\)", page) == [
        (name, name) for name in wanted
    ]
    assert {path.name for path in drawing.FOLDER.iterdir()} == {f"{name}.png" for name in wanted}
    for name in wanted:
        assert 5_000 < (drawing.FOLDER / f"{name}.png").stat().st_size < 100_000


PAGE = """
```python
import matplotlib.pyplot as plt
sides = 3
```

```python
fig, ax = plt.subplots(figsize=(1, 1))
ax.plot(range(sides))
```

<!-- picture: line -->
"""


def test_the_figure_before_a_picture_is_saved(
    drawing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    monkeypatch.setattr(drawing, "PAGE", page)
    drawing.main(["--folder", str(tmp_path / "all")])
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["line.png"] and not plt.get_fignums()
    with pytest.raises(SystemExit):
        drawing.main(["--folder", str(tmp_path / "some"), "circle"])
    assert "no such picture: circle" in capsys.readouterr().err
    page.write_text(PAGE + "\n<!-- picture: nothing -->\n")
    with pytest.raises(ValueError, match="nothing: wanted one figure before the picture, got 0"):
        drawing.main(["--folder", str(tmp_path / "more")])
