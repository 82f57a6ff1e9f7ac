"""Integrations with other packages; each module needs the package that it is named after."""
