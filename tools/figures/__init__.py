"""The pictures of the docs, one module each, drawn with the package itself: `make figures`.

A module has either `draw(figure)`, or

    X       the label of the horizontal axis; LOG_X, whether it is logarithmic
    PANELS  {key: title}, side by side
    LINES   {label: settings}, one entry per line
    curves  (**settings) -> {"x": [...], key: {series: [...]}, ...}

In the second case `docs/assets/javascripts/plots/<name>.js` may draw the same curves in the
browser, with sliders for the settings; a test compares the two.
"""
