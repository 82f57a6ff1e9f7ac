"""The docs' pictures; `docs/assets/javascripts/plots/<name>.js` may draw the same curves."""
