"""Heads in graphs that other batches run through: ``torch.export``, ``torch.compile``, ``torch.jit.trace``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import spherical_loss as sl
from spherical_loss.heads import AdaptiveSphericalSoftmax, FactoredHead, GramHead, Head, LikelihoodLayer, SampledSoftmax
from tests.support.cases import CASES, CosineLoss

from .reference import DenseReference, random_batch
from .test_heads import MixedTiers, optimizer_of, train_step

d, D, K = 6, 70, 4


def trained(Kind):
    torch.manual_seed(0)
    head = Kind(d, D)
    optimizer = optimizer_of(head, lr=1.0)
    for step in range(3):
        hidden, target, _ = random_batch(20, d, D, seed=step)
        train_step(head, sl.TaylorSoftmaxLoss(), optimizer, hidden.float(), target)
    return head.eval()


def random_layer(Kind, **options):
    torch.manual_seed(0)
    layer = Kind(d, D, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    if isinstance(layer, AdaptiveSphericalSoftmax):
        layer.tail.set_weight(torch.randn(layer.tail.num_classes, d))
    return layer.eval()


LAYERS = {
    **{Kind.__name__: lambda Kind=Kind: trained(Kind) for Kind in (GramHead, FactoredHead, MixedTiers)},
    "adaptive": lambda: random_layer(AdaptiveSphericalSoftmax, frequent=10),
    "sampled": lambda: random_layer(SampledSoftmax, negatives=5),
}


class Server(nn.Module):
    """The best classes, and the outputs of all."""

    def __init__(self, layer: nn.Module, loss: sl.Loss) -> None:
        super().__init__()
        self.layer, self.loss = layer, loss

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(self.layer, LikelihoodLayer):
            return self.layer.topk(hidden, K).classes, self.layer.log_prob(hidden)
        return self.layer.topk(hidden, K, self.loss).classes, self.layer.logits(hidden)


def exported(model, example):
    return torch.export.export(model, (example,), dynamic_shapes={"hidden": {0: torch.export.Dim("batch")}}).module()


def compiled(model, example):
    torch.compiler.reset()
    function = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    function(example)
    return function


def traced(model, example):
    return torch.jit.trace(model, example, check_trace=False)


graphs = pytest.mark.parametrize("graph", [exported, compiled, traced])
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:.*trace:torch.jit.TracerWarning")


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch):
    monkeypatch.setattr("spherical_loss.heads.base.CHUNK", 64)
    monkeypatch.setattr("spherical_loss.heads.base.GRAPH_CHUNK", 32)


@graphs
@pytest.mark.parametrize("name", LAYERS)
def test_topk_and_logits_of_another_batch_size(name, graph):
    layer = LAYERS[name]()
    server = graph(Server(layer, sl.TaylorSoftmaxLoss()), torch.randn(3, d))
    for size in (9, 2):
        hidden = torch.randn(size, d)
        best, outputs = server(hidden)
        if isinstance(layer, LikelihoodLayer):
            expected = score = layer.log_prob(hidden)
        else:
            expected = hidden.double() @ layer.weight.detach().double().T + layer.bias.detach().double()
            score = (expected + 1).abs()
        torch.testing.assert_close(outputs, expected.float(), rtol=1e-4, atol=1e-5)
        assert torch.equal(best, score.topk(K).indices)


class Exported(nn.Module):
    """What the guide to serving exports."""

    def __init__(self, head: Head, loss: sl.Loss) -> None:
        super().__init__()
        self.linear, self.loss = head.to_linear(), loss

    def forward(self, hidden: Tensor) -> Tensor:
        return self.loss.predict(self.linear(hidden), K)


@pytest.mark.parametrize("name", CASES)
def test_a_linear_layer_and_the_ranking_of_every_loss(name):
    head, case, hidden = trained(FactoredHead), CASES[name], torch.randn(9, d)
    best = exported(Exported(head, case.make()), torch.randn(3, d))(hidden)
    assert torch.equal(
        best, case.oracle(DenseReference(head.weight, head.bias).logits(hidden.double())).topk(K, largest=False).indices
    )


@graphs
def test_a_loss_that_ranks_by_its_formula(graph):
    head = trained(FactoredHead)
    server, hidden = graph(Server(head, CosineLoss()), torch.randn(3, d)), torch.randn(9, d)
    o = hidden.double() @ head.weight.double().T + head.bias.double()
    assert torch.equal(server(hidden)[0], o.topk(K).indices)


@graphs
def test_frames_are_refused_with_the_remedy(graph):
    head, loss, example = trained(FactoredHead), sl.TaylorSoftmaxLoss(), torch.randn(3, d)
    head.close_frame()
    with pytest.raises(Exception, match=r"call head.refactor\(\) before torch.export"):
        graph(Server(head, loss), example)
    head.refactor()
    assert torch.equal(graph(Server(head, loss), example)(example)[0], head.topk(example, K, loss).classes)
