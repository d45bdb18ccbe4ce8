import pytest
import torch
from torch.autograd import forward_ad

from spherical_loss.heads import products
from spherical_loss.heads.products import SMALL, linear, product, transposed


@pytest.fixture(params=["of this machine", "onednn"])
def way(request, monkeypatch):
    """Both ways, wherever torch has both: some builds, for other processors, have no oneDNN to call."""
    if request.param == "onednn":
        if not torch.backends.mkldnn.is_available():
            pytest.skip("this torch was built without oneDNN")
        monkeypatch.setattr(products, "onednn_is_faster", lambda: True)


def views(shape, generator):
    """Matrices of a shape, laid out in memory in several ways."""
    n, m = shape
    yield torch.randn(n, m, generator=generator)
    yield torch.randn(m, n, generator=generator).T
    yield torch.randn(2 * n, m + 5, generator=generator)[::2, 3 : m + 3]
    yield torch.randn(1, m, generator=generator).expand(n, m)


@pytest.mark.parametrize("shape", [(250, 304, 304), (301, 250, 301), (1, 4096, 64), (64, 4096, 1), (130, 1, 2100)])
def test_as_accurate_as_float32_allows(way, shape):
    n, k, m = shape
    assert n * k * m >= SMALL
    generator = torch.Generator().manual_seed(0)
    for X in views((n, k), generator):
        for Y in views((k, m), generator):
            exact = X.double() @ Y.double()
            scale = X.double().abs() @ Y.double().abs()  # of the terms that are added
            found = product(X, Y)
            assert found.shape == (n, m)
            assert found.dtype == torch.float32
            # Rounding errors of k terms grow as sqrt(k) at least; 1e-6 is 17 units of rounding.
            assert ((found - exact).abs() <= 1e-6 * scale).all()
            for M in views((n, m), generator):
                assert ((product(X, Y, plus=M) - (exact + M)).abs() <= 1e-6 * (scale + M.abs())).all()


@pytest.mark.parametrize("shape", [(0, 5, 4), (3, 0, 4), (3, 5, 0), (3, 5, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_and_empty(way, shape, dtype):
    n, k, m = shape
    X, Y = torch.randn(n, k, dtype=dtype), torch.randn(k, m, dtype=dtype)
    torch.testing.assert_close(product(X, Y), X @ Y, rtol=0, atol=0)
    M = torch.randn(n, m, dtype=dtype)
    torch.testing.assert_close(product(X, Y, plus=M), X @ Y + M)


def test_float64_keeps_its_digits(way):
    X, Y = torch.randn(100, 80, dtype=torch.float64), torch.randn(80, 90, dtype=torch.float64)
    torch.testing.assert_close(product(X, Y), X @ Y, rtol=1e-14, atol=1e-14)


def test_not_finite_stays_where_it_is(way):
    X, Y = torch.randn(100, 80), torch.randn(80, 90)
    X[3, 2], X[7, 1] = float("nan"), float("inf")
    assert (product(X, Y).isfinite().all(1) == X.isfinite().all(1)).all()


def test_the_same_bits_again(way):
    X, Y = torch.randn(250, 304), torch.randn(304, 304)
    assert torch.equal(product(X, Y), product(X.clone(), Y.clone()))


def test_a_graph_has_an_ordinary_product(way):
    """ONNX knows no products of oneDNN."""
    X, Y = torch.randn(100, 80), torch.randn(80, 90)
    graph = torch.export.export(Product(), (X, Y)).graph
    assert any(node.target is torch.ops.aten.matmul.default for node in graph.nodes)


class Product(torch.nn.Module):
    def forward(self, X, Y):
        return product(X, Y)


@pytest.mark.parametrize("shape", [(60, 80), (4, 15, 80), (80,)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_that_of_torch(way, shape, bias):
    H, W = torch.randn(*shape, requires_grad=True), torch.randn(5_000, 80, requires_grad=True)
    b = torch.randn(5_000, requires_grad=True) if bias else None
    inputs = (H, W, b) if b is not None else (H, W)
    g = torch.randn(*shape[:-1], 5_000)

    def with_gradients(inputs, g):
        o = torch.nn.functional.linear(*inputs)
        return o, *torch.autograd.grad(o, inputs, g)

    exact = with_gradients([x.detach().double().requires_grad_() for x in inputs], g.double())
    sizes = with_gradients([x.detach().double().abs().requires_grad_() for x in inputs], g.double().abs())  # of what is added
    o = linear(H, W, b)
    for ours, theirs, size in zip((o, *torch.autograd.grad(o, inputs, g)), exact, sizes, strict=True):
        assert ((ours - theirs).abs() <= 1e-6 * size).all()


def test_linear_has_second_derivatives(way):
    H, W = torch.randn(60, 80, requires_grad=True), torch.randn(90, 80, requires_grad=True)
    (grad,) = torch.autograd.grad(linear(H, W, None).square().sum(), H, create_graph=True)
    (found,) = torch.autograd.grad(grad.sum(), W)
    H64, W64 = H.detach().double().requires_grad_(), W.detach().double().requires_grad_()
    (grad,) = torch.autograd.grad((H64 @ W64.T).square().sum(), H64, create_graph=True)
    torch.testing.assert_close(found.double(), torch.autograd.grad(grad.sum(), W64)[0], rtol=1e-5, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch itself, for forward mode
def test_linear_under_transforms_and_autocast(way):
    H, W = torch.randn(3, 60, 80), torch.randn(90, 80)
    torch.testing.assert_close(torch.vmap(lambda h: linear(h, W, None))(H), H @ W.T, rtol=1e-5, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(H, W, None).dtype == torch.bfloat16
    with forward_ad.dual_level():
        tangent = torch.randn(90, 80)
        found = forward_ad.unpack_dual(linear(H, forward_ad.make_dual(W, tangent), None)).tangent
    torch.testing.assert_close(found, H @ tangent.T, rtol=1e-5, atol=1e-4)


def test_tensors_of_other_kinds_have_their_own_products(way):
    class Marked(torch.Tensor):
        pass

    X, Y = torch.randn(100, 80).as_subclass(Marked), torch.randn(80, 90)
    assert isinstance(product(X, Y), Marked)
    assert isinstance(linear(X, Y.T, None), Marked)


def test_transposed(way):
    X = torch.randn(60, 100)
    assert torch.equal(transposed(X), X.T)
