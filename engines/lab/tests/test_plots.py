"""Every plot says of what it is, and its legend hides no data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from sagellm.core import ConfigError
from sagellm.lab.plots import plot_replays, plot_rows, plot_serving

TITLE = "made$1$.jsonl: 3 requests"


def draw_replays(path: Path, num_capacities: int = 9) -> None:
    names = ("lru", "qos{within=reuse}", "belady", "off")
    capacities = [100 * 2**number for number in range(num_capacities)]
    plot_replays(
        path,
        title=TITLE,
        savings={name: [(each, 0.01) for each in capacities] for name in names},
        upper_bound=0.5,
        sharing={name: [0.1, 0.2, 0.95] for name in names},
    )


def draw_serving(path: Path) -> None:
    runs = {
        f"fair-share{{max_tokens={number}}},chunked-prefill{{min_share=0.5}}": [
            SimpleNamespace(arrival_ns=10**9 * each, first_token_ns=10**9 * each + 10**7 * (each + 1))
            for each in range(5)
        ]
        for number in range(5)
    }
    plot_serving(path, runs, title=TITLE)


def draw_load(path: Path) -> None:
    rows = {
        "arrival_ms": [0.0, 1.0], "first_token_ms": [3.0, None], "end_ms": [9.0, 12.0],
        "error": [None, "timeout"],
    }  # fmt: skip
    plot_rows(path, {"steady": rows, "burst": rows}, title=TITLE)


@pytest.fixture
def drawn(monkeypatch):
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, file: figures.append(self) or save(self, file))
    return figures


@pytest.mark.parametrize("draw", [draw_replays, draw_serving, draw_load])
def test_the_title_is_there_and_the_legend_beside_the_data(draw, drawn, tmp_path):
    draw(tmp_path / "plot.png")
    (figure,) = drawn
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert figure.get_suptitle() == TITLE
    (legend,) = figure.legends
    renderer = canvas.get_renderer()
    box = legend.get_window_extent(renderer)
    assert not any(axes.get_legend() for axes in figure.axes)
    assert not any(box.overlaps(axes.get_tightbbox(renderer)) for axes in figure.axes)
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1, "the legend is wider than the figure"


def test_policies_have_one_colour_in_both_halves(drawn, tmp_path):
    draw_replays(tmp_path / "plot.png")
    curve, histogram = drawn[0].axes
    lines = {line.get_color() for line in curve.lines if len(line.get_xdata()) > 2}
    assert len(lines) == 4
    assert {to_rgba(colour) for colour in lines} == {bar.get_facecolor() for bar in histogram.patches}


def test_the_bound_is_seen_though_it_is_far_above(drawn, tmp_path):
    draw_replays(tmp_path / "plot.png", num_capacities=1)
    curve, _ = drawn[0].axes
    assert curve.get_ylim()[1] > 50


def test_requests_that_failed_are_counted(drawn, tmp_path):
    draw_load(tmp_path / "plot.png")
    titles = [axes.get_title() for axes in drawn[0].axes]
    assert titles == [f"{name}: 1 failed, not drawn" for name in ("steady", "burst")]


def test_a_plot_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(ConfigError, match="the plot cannot be written to"):
        plot_rows(tmp_path / "nowhere" / "a.png", {"a": {"error": [], "arrival_ms": []}}, title="t")
