"""Curves: a picture from any run, of what has data."""

import pathlib
import re

import matplotlib.pyplot as plt
import pytest

from dllm_jax import curves


@pytest.mark.parametrize("count", [0, 1, 2, 40])
def test_curves_are_drawn_from_any_number_of_steps(tmp_path, count):
    rows = [{"step": 0, "heldout_accuracy": 0.2, "seconds/eval": 1.0}] * (count > 0)
    for step in range(1, count):
        rows.append(
            {
                "step": step,
                "reward": step / count,
                "accuracy": step / count,
                "kl": None,
                "value_loss": 1 / step,
                "logprob_gap_max": 0.0,
                "seconds/rollout": 1.0,
                "seconds/update": 2.0,
            }
        )
    picture = tmp_path / "curves.png"
    curves.draw(rows, picture)
    assert picture.exists() == (count > 0)
    if count:
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_phase_of_a_step_is_drawn_in_a_colour_of_its_own():
    """Those that the sources time: of a run's checkpoint, its best weights, and so on."""
    root = pathlib.Path(curves.__file__).parent
    text = "".join(path.read_text() for path in root.rglob("*.py"))
    assert {*re.findall(r"timer\(\"(\w+)\"\)", text)} == {*curves.PHASES}
    assert len({*curves.COLORS[: len(curves.PHASES)]}) == len(curves.PHASES)
    style = (root / "viewer" / "web" / "report.css").read_text()
    hues = re.findall(r"\.phase(\d) {", style)
    assert hues == [str(i) for i in range(len(curves.PHASES))]


def test_what_has_no_data_or_repeats_another_is_left_out():
    rows = [
        {"step": step, "reward": 0.1 * step + 1e-9, "accuracy": 0.1 * step, "kl": None}
        | {"logprob_gap_max": 0.0, "logprob_gap_mean": 0.1}
        for step in range(3)
    ]
    panels = dict(curves.panels_of(rows))
    assert {title: list(lines) for title, lines in panels.items()} == {
        "accuracy": ["accuracy"],
        "log-prob gap, sampling to training": ["logprob_gap_mean"],
    }


@pytest.mark.parametrize("value", [1.0, -3.0, 2e-9])
def test_what_never_changes_has_an_axis_that_says_where_it_is(value):
    figure, axis = plt.subplots()
    points = [(step, value * (1 + 1e-7 * step)) for step in range(5)]
    curves.draw_panel(axis, "advantage spread", {"advantage_std": points}, 7)
    figure.canvas.draw()
    ticks = [x.get_text() for x in axis.get_yticklabels()]
    low, high = axis.get_ylim()
    plt.close(figure)
    assert low < value < high and len(set(ticks)) == len(ticks)
    assert "+" not in axis.yaxis.get_offset_text().get_text()


def test_further_files_and_samplers_are_drawn_with_the_first():
    row = {"step": 1, "accuracy": 0.2, "heldout_accuracy": 0.5}
    row |= {"heldout_hard_accuracy": 0.4, "heldout_hard_wide_accuracy": 0.3}
    ((title, lines),) = curves.panels_of([row])
    assert title == "accuracy"
    assert {name: curves.label_of(name, lines) for name in lines} == {
        "heldout_accuracy": "held-out problems",
        "heldout_hard_accuracy": "held-out problems, hard",
        "heldout_hard_wide_accuracy": "held-out problems, hard wide",
        "accuracy": "rollouts",
    }


def test_dollars_in_a_files_name_are_no_formula(tmp_path):
    name = "heldout_for_$\\x{$_accuracy"
    rows = [{"step": i, "heldout_accuracy": 0.5, name: i / 5} for i in range(3)]
    curves.draw(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0


@pytest.mark.parametrize("points", [3, 40])
def test_every_line_is_drawn_and_looks_different(points):
    names = ["heldout_accuracy", *(f"heldout_{x}_accuracy" for x in "abcdefghij")]
    names += ["accuracy", "reward"]
    rows = [
        {"step": step} | {name: 0.05 * i for i, name in enumerate(names)}
        for step in range(points)
    ]
    figure = curves.figure_of(plt, rows)
    axis = figure.axes[0]
    legend = [x.get_text() for x in axis.get_legend().get_texts()]
    drawn = [x for x in axis.lines if x.get_label() in legend]
    looks = {(x.get_color(), x.get_linestyle()) for x in drawn}
    plt.close(figure)
    assert len(legend) == len(drawn) == len(looks) == len(names)


@pytest.mark.parametrize("count", [1, 4])
def test_the_seconds_of_a_step_are_a_bar(count):
    """Also those of a run's only step; no line leads from one to the next."""
    rows = [
        {"step": step, "seconds/rollout": 1.0, "seconds/eval": 9.0 * (step == 1)}
        for step in range(1, count + 1)
    ]
    figure = curves.figure_of(plt, rows)
    figure.canvas.draw()
    (axis,) = figure.axes
    areas = [x.get_datalim(axis.transData).bounds for x in axis.collections]
    ticks = [x.get_text() for x in axis.get_xticklabels()]
    top = axis.collections[1].get_paths()[0].vertices
    plt.close(figure)
    assert areas == [(0.5, 0, count, 1), (0.5, 1, count, 9)]
    assert {x for x, y in top if y > 1} == {0.5, 1.5}
    assert not any("." in x for x in ticks)


def test_what_20_000_steps_tell_can_be_seen():
    """A mean that is a line and no band, and bars that a pixel has room for."""
    rows = [
        {
            "step": step,
            "reward": float(step % 2 + step % 3),
            "seconds/rollout": step % 2,
        }
        for step in range(1, 20_001)
    ]
    figure = curves.figure_of(plt, rows)
    reward, seconds = figure.axes
    raw, mean = (line.get_ydata() for line in reward.lines)
    (bars,) = (x.get_paths()[0].vertices for x in seconds.collections)
    plt.close(figure)
    assert max(abs(y - 1.5) for y in mean[200:-200]) < 0.01
    parts = {0: raw[:101], 7: raw[:108], 5_000: raw[4_900:5_101], -1: raw[-101:]}
    assert {i: mean[i] for i in parts} == pytest.approx(
        {i: sum(part) / len(part) for i, part in parts.items()}
    )
    tops = {y for x, y in bars if 1 < x < 19_999}
    assert len(bars) < 5 * curves.BARS and tops == {0, 0.5}
    assert max(x for x, _ in bars) == 20_000.5


def test_whole_numbers_of_any_size_are_seconds(tmp_path):
    rows = [{"step": step, "seconds/rollout": 2**70} for step in (1, 2)]
    curves.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size


def test_no_axis_is_told_as_differences_from_a_number():
    """Such as "1e-7 + 1.0000001" beside an axis, which people read as its values."""
    rows = [
        {"step": 10**6 + step, "advantage_std": 1 + 1e-7 * step, "reward": 1.0}
        | {"logprob_gap_max": 1e-3 * (1 + 1e-6 * step), "seconds/rollout": 1000 + step}
        for step in range(5)
    ]
    shown = []
    with plt.rc_context(curves.STYLE):
        figure = curves.figure_of(plt, rows)
        figure.canvas.draw()
        for axis in figure.axes:
            shown += [x.get_offset_text().get_text() for x in (axis.xaxis, axis.yaxis)]
    plt.close(figure)
    assert len(shown) == 8 and not any("+" in x for x in shown)


@pytest.mark.parametrize("count", range(1, 16))
def test_the_grid_is_full(count):
    """Every cell belongs to one panel; the second row's are all there or none below it."""
    figure, axes = curves.grid(plt, count)
    assert len(axes) == count
    cells = set()
    for axis in axes:
        place = axis.get_subplotspec()
        covered = {(i, j) for i in place.rowspan for j in place.colspan}
        assert not covered & cells
        cells |= covered
    plt.close(figure)
    assert {(0, 0), (0, 1), (1, 0), (1, 1)} <= cells
    high = axes[0].get_gridspec().nrows
    if count > 3:  # until then the second row may be empty beside the large panel
        assert len(cells) == high * curves.WIDE
