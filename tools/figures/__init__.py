"""The pictures of the docs, drawn with the package itself and from committed results.

``python -m tools.figures [NAME ...]`` draws them for light and dark pages. `curves` has the losses:
`docs/assets/javascripts/plots/<name>.js` may draw the same curves in the browser, with sliders for
the settings; a test compares the two. `results` has the pictures of committed results.
"""
