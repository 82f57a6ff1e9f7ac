"""The package and its peers on a narrow screen: the panels of `benchmarks_peers` stacked."""

from matplotlib.figure import Figure

from tools.figures import benchmarks_peers


def draw(figure: Figure) -> None:
    """Draw the same points, time above memory."""
    benchmarks_peers.draw(figure, stacked=True)
