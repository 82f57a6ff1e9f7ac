"""The pictures of the docs, a module each, drawn with the package itself: `make figures`.

A module has either `draw(figure)`, or

    X       the label of the horizontal axis; LOG_X, whether it is logarithmic
    PANELS  {key: title}, side by side
    LINES   {label: settings}, what is drawn
    curves  (**settings) -> {"x": [...], key: {series: [...]}, ...}

and then `docs/assets/javascripts/plots/<name>.js` may draw the same curves in the browser, with
sliders for the settings; a test holds the two together.
"""
