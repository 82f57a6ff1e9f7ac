"""Every page of the site in a browser: formulas, pictures, sliders, search, width, palettes."""

import pytest

SIZES = [(1280, 900), (768, 1024), (390, 844)]  # of a desktop, a tablet and a phone
CLICK = "e => e.click()"
PALETTES = ("default", "slate")

BROKEN_FORMULAS = r"""() => {
  const broken = [...document.querySelectorAll(".arithmatex")]
    .filter((e) => !e.querySelector(".katex-html") || e.querySelector(".katex-error"))
    .map((e) => e.textContent)
  const copy = document.querySelector("article").cloneNode(true)
  for (const e of copy.querySelectorAll("code, pre, .arithmatex, script")) e.remove()
  return [...broken, ...(copy.textContent.match(/\$\$|\\\(|\\\[|\$[^$\n]{1,80}\$/g) ?? [])]
}"""
WIDER = """() => [...document.querySelectorAll("body *")].filter((e) => {
  if (document.documentElement.scrollWidth <= innerWidth) return false
  const box = e.getBoundingClientRect()
  return box.width && box.right > innerWidth + 1
}).map((e) => e.outerHTML.slice(0, 120)).slice(0, 5)"""
# A table fits; on a phone it may scroll, with a shadow over the side where more of it is.
CUT_TABLES = """() => [...document.querySelectorAll("article table:not([class])")].filter((e) => {
  const around = e.closest(".md-typeset__scrollwrap")
  if (!e.offsetParent) return false
  if (!around) return true
  if (around.scrollWidth <= around.clientWidth + 1) return false
  const { overflowX, backgroundImage } = getComputedStyle(around)
  return innerWidth > 700 || overflowX !== "auto" || !backgroundImage.includes("gradient")
}).map((e) => e.textContent.trim().slice(0, 60))"""
READY = """() => document.fonts.status === "loaded" &&
  [...document.querySelectorAll(".plot[data-plot]")].every((e) => e.plots)"""
SLIDERS = "name => import(`/assets/javascripts/plots/${name}.js`).then((m) => m.sliders)"
SHOWN = "e => Number(e.parentElement.querySelector('output').textContent)"
MOVE = "(e, to) => { e.value = e[to] ?? to; e.dispatchEvent(new Event('input')) }"
DATA = "e => JSON.stringify(Object.values(e.plots).map(p => p.data))"
UNSEEN_PICTURES = """() => Promise.all(
  [...document.querySelectorAll("article img")]
    .filter((e) => getComputedStyle(e).display !== "none" && e.offsetParent)
    .map((e) => e.decode().then(() => (e.naturalWidth ? null : e.src), () => e.src))
).then((all) => all.filter(Boolean))"""


def visit(page, address, path):
    page.goto(f"{address}/{path}/", wait_until="load")
    page.wait_for_function(READY)


def test_a_page_is_whole_at_every_width_by_day_and_by_night(page, address, where):
    visit(page, address, where)
    assert page.title()
    assert page.evaluate(BROKEN_FORMULAS) == []
    page.add_style_tag(content="* { transition: none !important; animation: none !important }")
    for palette in PALETTES:
        if palette != page.evaluate("document.body.dataset.mdColorScheme"):
            page.locator(f"[name=__palette][data-md-color-scheme={palette}]").evaluate(CLICK)
        assert page.evaluate("document.body.dataset.mdColorScheme") == palette
        for size in SIZES:
            page.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
            assert page.evaluate(WIDER) == [], (size, palette)
            assert page.evaluate(CUT_TABLES) == [], (size, palette)
            assert page.evaluate(UNSEEN_PICTURES) == [], (size, palette)
    assert page.said == []
    assert [url for url in page.asked if not url.startswith((address, "data:", "blob:"))] == []


def test_sliders_move_the_curves_and_begin_and_end_where_they_say(page, address, with_plot):
    visit(page, address, with_plot)
    plots = page.query_selector_all(".plot[data-plot]")
    assert plots
    for plot in plots:
        name = plot.get_attribute("data-plot")
        assert plot.query_selector(".plot-stage canvas"), f"{name}: no plot, only its picture"
        declared = page.evaluate(SLIDERS, name)
        sliders = plot.query_selector_all("input[type=range]")
        assert declared
        assert {slider.get_attribute("name") for slider in sliders} == set(declared)
        for slider in sliders:  # one at a time: where another stands at its end, one may be idle
            expected = declared[slider.get_attribute("name")]
            at_first, drawn = slider.evaluate("e => e.value"), []
            assert slider.evaluate(SHOWN) == pytest.approx(expected["value"], rel=5e-3)
            for end in ("min", "max"):
                slider.evaluate(MOVE, end)
                assert slider.evaluate(SHOWN) == pytest.approx(expected[end], rel=5e-3)
                drawn.append(plot.evaluate(DATA))
            assert drawn[0] != drawn[1], (name, slider.get_attribute("name"))
            assert "null" not in "".join(drawn), "JSON has null for what is no number"
            slider.evaluate(MOVE, at_first)
    assert page.said == []


# A page among the first so many, and the section of it that answers.
FOUND = """([found, among]) => [...document.querySelectorAll(".md-search-result__link")]
  .slice(0, among).some((e) => e.getAttribute("href").replace(/\\?h=[^#]*/, "").endsWith(found))"""


@pytest.mark.parametrize(
    ("asked", "among", "found"),
    [
        ("온도", 99, "/ko/losses/info_nce/"),
        ("損失", 99, "/ja/losses/nws/"),
        ("lambda", 2, "/faq/"),
        ("hard negatives", 2, "/faq/"),
        ("SpladeLoss", 2, "/sentence_transformers/"),
        ("dead activations", 2, "/troubleshooting/#dead-activations"),
        ("padding mask", 2, "/faq/#what-does-the-padding-mask-do"),
        ("all zero vectors", 2, "/faq/#what-happens-with-an-empty-text"),
    ],
)
def test_search_answers(page, address, asked, among, found):
    visit(page, address, "choose")
    page.keyboard.press("/")
    page.locator("input[name=query]").press_sequentially(asked, delay=10)
    page.wait_for_function(FOUND, arg=[found, among])
    assert page.said == []
