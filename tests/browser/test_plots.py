"""What a slider draws is what the package computes."""

import itertools
import math
from pathlib import Path

import pytest

from tools.figures.curves import FIGURES

ASSETS = Path(__file__).resolve().parents[2] / "docs" / "assets"
WITH_SLIDERS = sorted(path.stem for path in (ASSETS / "javascripts" / "plots").glob("*.js"))
assert WITH_SLIDERS, f"expected plots in {ASSETS}"
SOURCE = "import(`/assets/javascripts/plots/${name}.js`)"
SLIDERS = f"name => {SOURCE}.then((m) => m.sliders)"
CURVES = f"([name, s]) => {SOURCE}.then((m) => m.curves(s))"
LABELS = f"name => {SOURCE}.then((m) => [m.panels, m.x, m.lines])"


@pytest.mark.parametrize("name", WITH_SLIDERS)
def test_the_browser_draws_what_the_package_computes(page, address, name):
    page.goto(f"{address}/404.html")
    figure, sliders = FIGURES[name], page.evaluate(SLIDERS, name)
    panels, x, lines = page.evaluate(LABELS, name)
    assert (panels, x["label"], bool(x.get("log"))) == (figure.panels, figure.x, figure.log_x)
    assert list(lines.items()) == list(figure.lines.items())
    settings = [{key: s["value"] for key, s in sliders.items()}, *figure.lines.values()]
    for values in itertools.product(*((s["min"], s["max"]) for s in sliders.values())):
        settings.append(dict(zip(sliders, values, strict=True)))
    for setting in settings:
        assert set(setting) == set(sliders)
        drawn, computed = page.evaluate(CURVES, [name, setting]), figure.curves(**setting)
        assert list(drawn["x"]) == pytest.approx(list(computed["x"]), rel=1e-12, abs=1e-12)
        for panel in figure.panels:
            assert list(drawn[panel]) == list(computed[panel])
            for series, values in computed[panel].items():
                assert all(map(math.isfinite, values))
                expected = pytest.approx(list(values), rel=1e-9, abs=1e-12)
                assert list(drawn[panel][series]) == expected, (setting, panel, series)
