"""The style of plots, and the checks of their paths before hours are spent on the measurements."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.settings.user_error import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D")  # Okabe and Ito, and one more
LEFT = 0.065  # of the figure: where everything begins
GREY = "#8A8F98"
INK = "#22262B"
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.color": "#E7E9EC",
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "rekindle",
}


def check_plot_path(path: Path) -> None:
    """Check that a plot can be written there. Raises UserError."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"--plot {path}: accepted: a name that ends in {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.absolute().parent.name}")
    if find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install 'rekindle[plot]'")


def set_title(figure: Figure, title: str) -> None:
    figure.suptitle(title, x=LEFT, y=0.975, ha="left", fontsize=14, fontweight="bold", color=INK)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure. Raises OSError."""
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
