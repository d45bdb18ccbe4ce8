"""The study of quality for time, on a text of 60 words: what is measured, what is searched, and what is repeated."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.quality import contenders, gap, leverages, page, study, training
from benchmarks.quality.contenders import CONTENDERS
from benchmarks.quality.study import Budget, Study
from benchmarks.quality.training import Session, Training, measured, trained
from spherical_loss.experiments.data.corpora import TextSet, TextSplits
from spherical_loss.experiments.data.simlex import pairs_in
from spherical_loss.experiments.data.text import EOS
from spherical_loss.experiments.table import markdown

D, d = 60, 16
SAME_MODEL = {  # with a bias, the spherical softmax is the Taylor softmax of other outputs, at eps times the rate
    "adaptive spherical softmax, spherical": "adaptive spherical softmax, Taylor",
    "spherical, three tiers": "Taylor, three tiers",
    "spherical, one head": "Taylor, one head",
}


@pytest.fixture(autouse=True)
def small_text(monkeypatch: pytest.MonkeyPatch) -> TextSplits:
    """Words by Zipf's law, but each of the two most frequent ones is always followed by itself or the other: to be learned."""
    generator = torch.Generator().manual_seed(0)
    p = 1 / torch.arange(1, D + 1)
    drawn = torch.multinomial(p, 4_000, replacement=True, generator=generator)
    common = torch.arange(4_000) // 20 % 2 == 0
    ids = torch.where(common, drawn % 2, drawn).to(torch.int32)
    words = [EOS, *(f"word{i}" for i in range(1, D))]
    splits = TextSplits(
        *(TextSet(ids, a, b, 6, words, pairs_in(words, []), 10**6) for a, b in ((0, 3_000), (3_000, 3_500), (3_500, 4_000)))
    )
    monkeypatch.setattr(training, "corpus", lambda vocabulary: splits)
    monkeypatch.setattr(study, "corpus", lambda vocabulary: splits)
    monkeypatch.setattr(training, "frequencies", lambda vocabulary: splits.train.frequencies)
    for module, name, value in [
        (training, "HIDDEN", d), (training, "EMBEDDING", 4), (training, "BATCH", 20),
        (contenders, "FREQUENT", (3, 10)), (contenders, "TAIL_CUTOFFS", (20,)),
        (contenders, "NEGATIVES", 16), (contenders, "CUTOFFS", (10, 30)), (contenders, "CUTS", (5, 20)),
    ]:  # fmt: skip
        monkeypatch.setattr(module, name, value)
    return splits


def example(name: str, steps: int = 30) -> Training:
    """At rates that suit 60 words."""
    lr = 0.03 if name.startswith("adaptive spherical") else 0.3  # its tails have 25 times that
    return Training("115,519", name, 1, steps, 0.02, lr, CONTENDERS[name].options)


def dense_log_probabilities(name: str, layer: contenders.Layer, h: torch.Tensor) -> torch.Tensor:
    """The distribution over all words, written anew in float64 from the dense weights."""

    def family(o: torch.Tensor) -> torch.Tensor:
        spherical = name in ("spherical, three tiers", "spherical, one head", "adaptive spherical softmax, spherical")
        g = o**2 + 0.02 if spherical else 1 + o + o**2 / 2
        return (g / g.sum(1, keepdim=True)).log()

    def linear(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return h @ weight.detach().double().T + bias.detach().double()

    if name == "dense softmax":
        return linear(layer.linear.weight, layer.linear.bias).log_softmax(1)
    if name == "sampled softmax":
        return linear(layer.layer.head.weight, layer.layer.head.bias).log_softmax(1)
    if name.startswith("adaptive spherical"):
        first = (linear(layer.layer.weight, layer.layer.bias) * layer.layer.scale.double()).log_softmax(1)
        (second,), tails = layer.layer.softmaxes, [tail.to_linear() for tail in layer.layer.tails]
        inside = [linear(second.weight, second.bias).log_softmax(1), *(family(linear(t.weight, t.bias)) for t in tails)]
        by_rank = torch.cat([first[:, :-3], *(first[:, k - 3, None] + log_p for k, log_p in enumerate(inside))], 1)
        return torch.empty_like(by_rank).index_copy_(1, layer.layer.order, by_rank)
    if "three tiers" in name:
        h = h / h.square().mean(1, keepdim=True).sqrt()
    exported = layer.head.to_linear()
    return family(linear(exported.weight, exported.bias))


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name not in ("adaptive softmax", "Z-loss, three tiers")])
def test_what_is_measured_is_what_a_dense_float64_computation_gives(name: str, small_text: TextSplits) -> None:
    session = Session(example(name))
    for _ in range(30):
        session.step()
    found = measured(session.model, small_text.test, 200)
    words, target = small_text.test.batch(torch.arange(200) * 500 // 200)
    h = session.model.hidden(words).detach().double()
    log_p = dense_log_probabilities(name, session.model.layer, h)
    own = log_p.gather(1, target.unsqueeze(1))
    assert found["perplexity"] == pytest.approx(math.exp(-float(own.mean())), rel=1e-4)
    rank = (log_p >= own).sum(1) - 1
    for k in (1, 10):
        assert found[f"top{k}"] == pytest.approx(float((rank >= k).double().mean()), abs=0.011)  # two ties at most


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_learns(name: str) -> None:
    result = trained(example(name, steps=120), in_search=False)
    assert [point["step"] for point in result["curve"]] == [15, 30, 60, 120]
    first, last = result["curve"][0], result["end"]
    if name == "Z-loss, three tiers":
        assert last["perplexity"] is None
        assert last["top10"] <= first["top10"]
    else:
        assert last["perplexity"] < first["perplexity"]


@pytest.mark.parametrize("name", SAME_MODEL)
def test_the_spherical_softmax_makes_the_steps_of_the_taylor_softmax(name: str) -> None:
    """At eps times the rate: in the study, their rows differ by the steps that fit into the time, and by rounding."""
    twin, curves = SAME_MODEL[name], []
    for contender in (name, twin):
        rate = 0.3 * CONTENDERS[contender].output_lr / CONTENDERS[twin].output_lr
        session = Session(Training("115,519", contender, 1, 100, 0.02, rate))
        curves.append([float(session.step()) for _ in range(100)])
    assert curves[0][-1] < 0.95 * curves[0][0]
    assert curves[0] == pytest.approx(curves[1], rel=2e-5)


def test_a_training_that_diverges_says_so() -> None:
    result = trained(Training("115,519", "sampled softmax", 1, 60, 1e6, 1e6), in_search=True)
    assert "end" not in result
    assert "nan" in result["diverged"] or "inf" in result["diverged"]


class InThisProcess:
    """Stands for the pool of processes."""

    def __init__(self, *arguments: object) -> None: ...

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *error: object) -> None: ...

    def submit(self, function, *arguments, **options):  # type: ignore[no-untyped-def]
        job: study.Future[object] = study.Future()
        job.set_result(function(*arguments, **options))
        return job


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "ProcessPoolExecutor", InThisProcess)


NAMES = ["sampled softmax", "dense softmax"]


def test_a_study_from_start_to_end_and_again(tmp_path: Path, one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "TRIALS", 3)
    path = tmp_path / "quality.json"
    Study(path, "all", Budget(20, 10, "steps")).run(NAMES, workers=1)
    stored = json.loads(path.read_text())["all"]
    assert len(stored["trials"]) == 2 * 3
    assert {(run["contender"], run["seed"]) for run in stored["runs"]} == {(name, seed) for seed in (1, 2, 3) for name in NAMES}
    for name in NAMES:
        finished = [t for t in stored["trials"] if t["contender"] == name and "end" in t]
        best = min(finished, key=lambda t: t["end"]["perplexity"])
        assert {(run["lr"], run["output_lr"]) for run in stored["runs"] if run["contender"] == name} == {
            (best["lr"], best["output_lr"])
        }

    monkeypatch.setattr(study, "trained", lambda *arguments, **options: pytest.fail("trained again"))
    Study(path, "all", Budget(20, 10, "steps")).run(NAMES, workers=1)
    assert json.loads(path.read_text())["all"] == stored
    with pytest.raises(SystemExit, match="'training': 20"):
        Study(path, "all", Budget(30, 10, "steps"))


def test_a_search_at_another_vocabulary(tmp_path: Path, one_process: None) -> None:
    path, budget = tmp_path / "quality.json", Budget(20, 10, "steps")
    Study(path, "100", budget).run(NAMES[:1], workers=1)
    Study(path, "all", budget, searched="100").run(NAMES[:1], workers=1)
    stored = json.loads(path.read_text())
    assert stored["all"]["trials"] == []
    here, there = ({(run["seed"], run["lr"], run["output_lr"]) for run in stored[v]["runs"]} for v in ("100", "all"))
    assert here == there
    assert len(here) == 3


def test_the_search_is_the_same_for_all(tmp_path: Path) -> None:
    """The same number of trials of the same length, at the same multiples of where they start."""
    study_ = Study(tmp_path / "quality.json", "all", Budget(20, 10, "steps"))
    factors = {}
    for name, contender in CONTENDERS.items():
        trials = study_.trials(name)
        assert {trial.steps for trial in trials} == {10}
        assert (trials[0].lr, trials[0].output_lr) == (contender.lr, contender.output_lr)
        if not contender.options:
            factors[name] = [x for t in trials for x in (t.lr / contender.lr, t.output_lr / contender.output_lr)]
    expected = factors["dense softmax"]
    assert len(set(expected)) > 4
    assert all(found == pytest.approx(expected, rel=0.01) for found in factors.values())  # values are rounded to three digits


def test_steps_follow_from_the_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contenders that are added later are measured beside the reference, in the seconds of its first measurement."""
    machine = {"sampled softmax": 0.01, "dense softmax": 0.4, "Taylor, tiers": 0.02}
    monkeypatch.setattr(study, "measured_paces", lambda trainings: {t.contender: machine[t.contender] for t in trainings})
    study_ = Study(tmp_path / "quality.json", "all", Budget(300, 20, "seconds"))
    study_.measure_paces(NAMES)
    machine = {name: 3 * seconds for name, seconds in machine.items()}  # a slower machine
    study_.measure_paces([*NAMES, "Taylor, tiers"])
    assert study_.steps("sampled softmax", 300) == 30_000
    assert study_.steps("Taylor, tiers", 300) == 15_000
    assert study_.steps("dense softmax", 300) == 750


def test_paces_are_measured() -> None:
    paces = study.measured_paces([example(name) for name in NAMES])
    assert set(paces) == set(NAMES)
    assert all(0 < seconds < 1 for seconds in paces.values())


def test_table_and_picture(tmp_path: Path) -> None:
    def run(name: str, seed: int, perplexity: float | None) -> dict[str, object]:
        ends = {"top1": 0.8, "top10": 0.5, "top100": 0.2}
        curve = [{"step": step, "perplexity": perplexity and perplexity * 8 / step, **ends} for step in (4, 8)]
        return {**asdict(Training("all", name, seed, 8, 0.1, 1.0)), "curve": curve, "end": curve[-1]}

    runs = [run("sampled softmax", 1, 100.0), run("sampled softmax", 2, 110.0), run("Z-loss, three tiers", 1, None)]
    runs.append({**asdict(Training("all", "Taylor, tiers", 1, 8, 0.1, 1.0)), "diverged": "nan"})
    paces = {"sampled softmax": 0.01, "Z-loss, three tiers": 0.02}
    part = {"words": 60, "budget": asdict(Budget(300, 20, "seconds")), "paces": paces, "trials": [], "runs": runs}
    rows = page.table(part)
    assert [row[0] for row in rows] == ["sampled softmax", "Z-loss, three tiers"]
    assert rows[0][3] == "105 (100 to 110)"
    assert rows[1][3] == "ranks only"
    assert page.title(part).startswith("60 words, 5 minutes of one thread, seeds: 1 to 2")
    page.draw({"all": part}, tmp_path / "picture.svg")
    assert "sampled softmax" in (tmp_path / "picture.svg").read_text()


def test_the_effect_of_tiers_is_paired_by_seed() -> None:
    def end(name: str, seed: int, perplexity: float) -> dict[str, Any]:
        return {"contender": name, "seed": seed, "end": {"perplexity": perplexity}}

    runs = [end(page.ONE_HEAD, 1, 200.0), end(page.ONE_HEAD, 2, 100.0), end(page.TIERS, 2, 90.0), end(page.TIERS, 1, 160.0)]
    part = {"words": 100, "budget": asdict(Budget(2_000, 500, "steps")), "paces": {}, "trials": [], "runs": runs}
    table = page.by_classes({"100": part, "1,000": {**part, "runs": runs[:2]}})  # the second has no tiers yet
    assert table.rows == [["100", "150 (100 to 200)", "125 (90 to 160)", "0.85", "0.80 to 0.90"]]


def test_leverages_of_a_trained_layer(small_text: TextSplits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leverages, "RANKS", (0, 10, 60))
    monkeypatch.setattr(leverages, "corpus", lambda vocabulary: small_text)
    found = leverages.measured(example("Taylor, tiers"), 200)
    session = Session(example("Taylor, tiers"))
    for _ in range(30):
        session.step()
    W = torch.cat([session.model.layer.head.weight, session.model.layer.head.bias.unsqueeze(1)], 1).detach().double()
    W[:, -1] += 1
    l_c = (W @ torch.linalg.pinv(W.T @ W, rtol=1e-10) * W).sum(1)
    h = session.model.hidden(small_text.test.batch(torch.arange(200) * 500 // 200)[0]).detach().double()
    g = (torch.cat([h, torch.ones(200, 1)], 1) @ W.T) ** 2 + 1
    largest = (g / g.sum(1, keepdim=True)).amax(0)
    for row, part in zip(found, (slice(0, 10), slice(10, 60)), strict=True):
        assert row["leverage"] == pytest.approx(float(l_c[part].sum()), rel=1e-3)
        assert row["largest"] == pytest.approx(float(largest[part].sum()), rel=1e-3)
    assert "all" in markdown(leverages.table(found))


@pytest.mark.parametrize("name", [gap.OURS, gap.OTHER])
def test_nats_by_rank_are_those_of_a_dense_float64_computation(
    name: str, small_text: TextSplits, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attribute, value in {"corpus": lambda _: small_text, "RANGES": (3, 10, 20, 1_000)}.items():
        monkeypatch.setattr(gap, attribute, value)
    found = gap.measured(example(name), 200)
    assert [(row["from"], row["to"]) for row in found] == [(0, 3), (3, 10), (10, 20), (20, D)]
    session = Session(example(name))
    for _ in range(30):
        session.step()
    words, target = small_text.valid.batch(torch.arange(200) * 500 // 200)
    log_p = dense_log_probabilities(name, session.model.layer, session.model.hidden(words).detach().double())
    for row in found:
        here = (target >= row["from"]) & (target < row["to"])
        of_range = log_p[here, row["from"] : row["to"]].logsumexp(1)
        of_word = log_p[here].gather(1, target[here].unsqueeze(1)).squeeze(1)
        assert row["share"] == float(here.double().mean())
        assert row["range"] == pytest.approx(-float(of_range.sum()) / 200, rel=1e-4)
        assert row["word"] == pytest.approx(float((of_range - of_word).sum()) / 200, rel=1e-4, abs=1e-6)
    assert gap.table({gap.OURS: found, gap.OTHER: found}).rows[-1][-1] == "+0.000"
