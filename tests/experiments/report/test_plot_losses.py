"""The picture of the losses in the README."""

import xml.etree.ElementTree as ET

import pytest
import torch

from spherical_loss.experiments.report import plot_losses
from tests.support import oracle


def test_the_same_picture_every_time(tmp_path):
    for name in ("a.svg", "b.svg"):
        plot_losses.main([str(tmp_path / "new" / name)])
    picture = (tmp_path / "new" / "a.svg").read_bytes()
    assert picture == (tmp_path / "new" / "b.svg").read_bytes()
    assert ET.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    curves = [
        path
        for path in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}path")
        if "stroke-width: 1.8" in path.get("style", "")
    ]
    assert len(curves) == 3 * len(plot_losses.LOSSES)  # two panels and the legend


def test_curves_are_the_losses():
    o_c = torch.linspace(-3, 3, 11, dtype=torch.float64)
    o = torch.cat([o_c.unsqueeze(1), plot_losses.OTHERS.expand(11, -1)], 1).requires_grad_()
    wanted = oracle.quadratic(1, 1, 0.5)(o)[:, 0]
    values, slopes = plot_losses.curve(plot_losses.LOSSES["log-Taylor softmax"][0], o_c)
    torch.testing.assert_close(values, wanted.detach())
    torch.testing.assert_close(slopes, torch.autograd.grad(wanted.sum(), o)[0][:, 0])


def test_one_file_is_needed():
    with pytest.raises(SystemExit, match="give one file to write"):
        plot_losses.main([])
