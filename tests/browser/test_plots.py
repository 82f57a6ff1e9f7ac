"""What a slider draws is what the package computes."""

import importlib
import itertools
import math

import pytest

from tools.figures.__main__ import names

MODULES = {name: importlib.import_module(f"tools.figures.{name}") for name in names()}
WITH_CURVES = [name for name, module in MODULES.items() if hasattr(module, "curves")]
SOURCE = "import(`/assets/javascripts/plots/${name}.js`)"
SLIDERS = f"name => {SOURCE}.then((m) => m.sliders)"
CURVES = f"([name, s]) => {SOURCE}.then((m) => m.curves(s))"
LABELS = f"name => {SOURCE}.then((m) => [m.panels, m.x])"


@pytest.mark.parametrize("name", WITH_CURVES)
def test_the_browser_draws_what_the_package_computes(page, address, folder, name):
    if not (folder / "assets/javascripts/plots" / f"{name}.js").exists():
        pytest.skip("a picture without sliders")
    page.goto(f"{address}/404.html")
    module, sliders = MODULES[name], page.evaluate(SLIDERS, name)
    ends = [(key, (s["min"], s["max"])) for key, s in sliders.items()]
    settings = [{key: s["value"] for key, s in sliders.items()}, *module.LINES.values()]
    for values in itertools.product(*(pair for _, pair in ends)):
        settings.append(dict(zip((key for key, _ in ends), values, strict=True)))
    for setting in settings:
        assert set(setting) == set(sliders)
        drawn, computed = page.evaluate(CURVES, [name, setting]), module.curves(**setting)
        assert list(drawn["x"]) == pytest.approx(list(computed["x"]), rel=1e-12, abs=1e-12)
        for panel in module.PANELS:
            assert list(drawn[panel]) == list(computed[panel])
            for series, values in computed[panel].items():
                assert all(map(math.isfinite, values))
                expected = pytest.approx(list(values), rel=1e-9, abs=1e-12)
                assert list(drawn[panel][series]) == expected, (setting, panel, series)


@pytest.mark.parametrize("name", WITH_CURVES)
def test_panels_and_axes_are_named_alike(page, address, folder, name):
    if not (folder / "assets/javascripts/plots" / f"{name}.js").exists():
        pytest.skip("a picture without sliders")
    page.goto(f"{address}/404.html")
    module = MODULES[name]
    panels, x = page.evaluate(LABELS, name)
    assert panels == module.PANELS
    assert x["label"] == module.X
    assert bool(x.get("log")) == getattr(module, "LOG_X", False)
