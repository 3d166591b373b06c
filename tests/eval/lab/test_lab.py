import json

import pytest
import torch
from typer.testing import CliRunner

from ropex.cli import app
from ropex.errors import OptionError
from ropex.eval.lab.geometry import made_up_rope, plot_geometry, run_geometry, spread
from ropex.eval.lab.nrw import NEEDLES, draw_rows, measure, plot_nrw, run_nrw, train


@pytest.fixture(scope="module")
def geometry() -> dict:
    return run_geometry(1024, 64)


def result(report: dict, method: str) -> dict:
    return next(row for row in report["results"] if row["method"] == method)


def test_rotation_keeps_the_norm_of_a_cloud(geometry):
    for row in geometry["results"]:
        assert row["frobenius"] == pytest.approx([1.0] * len(geometry["lengths"]), abs=1e-9)


def test_one_pair_costs_the_first_singular_value_sqrt_2_and_all_pairs_sqrt_d():
    theta = torch.tensor([0.5, 0.37, 0.11, 0.05])
    one = torch.zeros(8)
    one[0] = 1
    assert 1 / spread(theta, 20_000, one).first_singular_value().item() == pytest.approx(2**0.5, rel=1e-3)
    assert 1 / spread(theta, 20_000).first_singular_value().item() == pytest.approx(8**0.5, rel=2e-2)
    assert spread(theta, 20_000).stable_rank().item() == pytest.approx(8, rel=2e-2)
    assert spread(torch.zeros(4), 1000).stable_rank().item() == pytest.approx(1)


def test_a_cloud_is_the_matrix_of_turned_vectors():
    theta = made_up_rope(16, 256)
    from ropex.spec import make_spec

    table = make_spec("rope-id", theta).table(theta).theta
    n = torch.arange(300.0, dtype=torch.float64)[:, None] * table.double()
    x = torch.cat((n.cos() - n.sin(), n.cos() + n.sin()), 1) / 4
    values = torch.linalg.svdvals(x)
    cloud = spread(table, 300)
    assert cloud.first_singular_value().item() == pytest.approx(values[0].item() / 300**0.5)
    assert cloud.stable_rank().item() == pytest.approx((values.square().sum() / values[0] ** 2).item())


def test_only_rope_id_stays_beyond_its_window_what_it_was_inside(geometry):
    at, end = geometry["lengths"].index(1024), -1
    shrink = {row["method"]: row["shrink"] for row in geometry["results"]}
    assert shrink["rope-id"][end] / shrink["rope-id"][at] == pytest.approx(1, abs=0.01)
    assert shrink["rope-id"][end] == pytest.approx(2**0.5, abs=0.01)
    assert shrink["rope"][end] / shrink["rope"][at] > 1.5 and shrink["high-freq"][end] > 6
    assert result(geometry, "rope-id")["criteria"]["bounded"] and result(geometry, "rope-id")["criteria"]["reached"]


def test_a_row_has_needles_inside_and_outside_as_it_says():
    values, needles, carried, inside = draw_rows(200, 96, 16, torch.Generator().manual_seed(0))
    assert (needles.sum(1) == NEEDLES).all()
    assert torch.equal(needles[:, -16:].sum(1), inside.sum(1).float())
    assert (needles[:, : 96 - 64] == 0).all()
    for row in range(200):
        assert set(values[row][needles[row] > 0].tolist()) == set(carried[row].tolist())
        assert set(values[row, -16:][needles[row, -16:] > 0].tolist()) == set(carried[row][inside[row]].tolist())
    assert 0.4 < inside.float().mean() < 0.6


def test_the_model_learns_to_tell_and_moves_its_frequencies_only_when_it_may():
    found = {learned: train(8, learned, 48, 4, 150, 0) for learned in (False, True)}
    table = made_up_rope(8, 48)
    from ropex.spec import make_spec

    start = make_spec("rope", table).table(table).theta.tolist()
    assert found[False]["theta"] == start != found[True]["theta"]
    assert min(row["accuracy"] for row in found.values()) > 0.8
    assert sum(found[True]["shares"]) == pytest.approx(1)


def test_an_untrained_model_guesses():
    from ropex.eval.lab.nrw import OneHead

    torch.manual_seed(0)
    assert 0.3 < measure(OneHead(torch.ones(4), False), 16, 64)["accuracy"] < 0.7


def test_windows_that_leave_no_outside_are_refused():
    for widths in ([], [2], [64]):
        with pytest.raises(OptionError, match="widths"):
            run_nrw(widths, length=64)
    with pytest.raises(OptionError, match="multiple of 4"):
        made_up_rope(10, 64)


def test_figures_and_json(geometry, tmp_path):
    plot_geometry(geometry, tmp_path / "geometry.png")
    report = run_nrw([8, 16], length=48, steps=2)
    plot_nrw(report, tmp_path / "nrw.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("geometry", "nrw"))
    done = CliRunner().invoke(app, ["lab", "nrw", "--widths", "8", "--length", "48", "--steps", "2", "--json"])
    assert [row["learned"] for row in json.loads(done.stdout)["results"]] == [False, True]
    done = CliRunner().invoke(app, ["lab", "geometry", "--window", "128", "--head-dim", "16"])
    assert done.exit_code == 0 and "rope-id" in done.stdout
