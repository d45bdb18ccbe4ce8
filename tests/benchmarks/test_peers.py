"""What the benchmarks measure against, at small sizes: that it is what it says, and that the tables have all of it."""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from spherical_loss.benchmarks import losses, parts, peers, publish, quality, side_by_side, timing
from spherical_loss.experiments import cli, data


def test_noise_contrastive_loss_is_that_of_the_formula() -> None:
    torch.manual_seed(0)
    D, d, N = 40, 6, 12
    head = peers.NoiseContrastiveHead(d, D, negatives=9)
    head.set_bias(torch.randn(D))
    hidden, target = torch.randn(N, d), torch.randint(D, (N,))
    torch.manual_seed(3)
    value = head.training_loss(hidden, target).item()
    torch.manual_seed(3)
    noise = [min(D - 1, int(math.exp(u * math.log(D + 1)) - 1)) for u in torch.rand(9).tolist()]
    o = (hidden.double() @ head.weight.detach().double().T + head.bias.detach().double()).tolist()

    def posterior(n: int, c: int) -> float:
        """The probability that c is the target of example n, and not one of the 9 draws from the noise."""
        odds = math.exp(o[n][c]) / (9 * math.log((c + 2) / (c + 1)) / math.log(D + 1))
        return odds / (1 + odds)

    total = sum(
        -math.log(posterior(n, c)) - sum(math.log(1 - posterior(n, k)) for k in noise) for n, c in enumerate(target.tolist())
    )
    assert math.isclose(value, total / N, rel_tol=1e-5)


def test_naive_taylor_softmax_is_the_taylor_softmax() -> None:
    o, target = torch.randn(8, 5, dtype=torch.float64), torch.arange(8) % 5
    numerators = ((o + 1) ** 2 + 1) / 2
    expected = (numerators.sum(1).log() - numerators[torch.arange(8), target].log()).mean()
    torch.testing.assert_close(losses.naive_taylor_softmax(o, target), expected)


def test_side_by_side_has_a_row_for_every_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    for rate in (timing.matmul_rate, timing.copy_rate):  # of this machine they take seconds
        monkeypatch.setattr(side_by_side, rate.__name__, partial(rate, n=64, repeats=1))
    rows = side_by_side.compared("small", 16, 8, 3000, seconds=0.0)
    assert [row["name"] for row in rows[1:]] == list(side_by_side.CONTENDERS)
    for row in rows[1:]:
        assert 0 < row["ratio"].low <= row["ratio"].median <= row["ratio"].high
        assert row["seconds"].median > 0
    # Weights and gradient of 3,000 x 8 take 192 kB, the three matrices of 16 x 3,000 of the dense layer 576 kB.
    monkeypatch.setattr(side_by_side, "available", lambda: 400_000)
    rows = side_by_side.compared("small", 16, 8, 3000, seconds=0.0)
    missing = [row for row in rows if row["seconds"] is None]
    assert [row["name"] for row in missing] == ["dense + cross-entropy + SGD", "F.linear_cross_entropy + SGD"]
    assert side_by_side.cells(missing[0])[2:] == ["does not fit", "", "", "1 MB"]


def test_quality_without_data_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    assert quality.run() == []
    assert "imdb.train.txt" in capsys.readouterr().out


def test_bench_measures_the_parts_that_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(parts.PARTS, "losses", lambda results: [{"name": "a", "seconds": 1.0}])
    (tmp_path / "bench.json").write_text('{"gram": [{"name": "before"}]}')
    assert cli.main(["bench", "--parts", "losses", "--results", str(tmp_path)]) == 0
    measured = json.loads((tmp_path / "bench.json").read_text())
    assert measured["losses"] == [{"name": "a", "seconds": 1.0}]
    assert measured["gram"] == [{"name": "before"}]


def test_without_linux_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cli.main(["bench", "--parts", "losses", "--results", str(tmp_path)]) == 1
    assert "needs Linux" in capsys.readouterr().err


def test_publishing_names_the_parts_that_were_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(publish, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match="no figures of losses, gram"):
        publish.stored_figures()
    (tmp_path / "bench.json").write_text(json.dumps({part: [{}] for part in parts.PARTS}))
    with pytest.raises(SystemExit, match=r"python -m spherical_loss\.benchmarks\.crossover"):
        publish.stored_figures()


def test_losses_are_compared_in_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses.TARGETS, (4, 7), (1.0, None))
    monkeypatch.setattr(losses, "compiled_cross_entropy", lambda: None)  # needs a C++ compiler, and a minute
    rows = losses.compare(4, 7, repeats=3, peer_repeats=2)
    names = [row["name"] for row in rows]
    assert len(names) == len(set(names))
    assert names[0] == losses.REFERENCE
    assert {"TaylorSoftmaxLoss", "naive Taylor softmax", "entmax.sparsemax_loss"} <= set(names)
    assert all(row["seconds"].median > 0 for row in rows)


def test_an_unknown_part_lists_the_valid_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--parts", "speed"]) == 2
    assert "side-by-side" in capsys.readouterr().err
