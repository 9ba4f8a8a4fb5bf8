"""The tape: every operation's derivative against finite differences, once and twice, and the two forms of
it.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp4bf16 as fb
from fp4bf16 import nn
from fp4bf16.errors import ShapeError
from fp4bf16.nn import ops as F
from fp4bf16.nn.tape import Variable, backward, grad, no_grad

EPS = 1e-5


def gradients(f, arrays, g, create_graph=False):
    variables = [Variable(a, requires_grad=True) for a in arrays]
    return variables, grad(f(*variables), variables, g=g, create_graph=create_graph)


def close(got, want, rtol=1e-6, atol=1e-8):
    scale = max(float(np.abs(want).max(initial=0.0)), 1e-3)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=max(atol, rtol * scale))


def shifted(arrays, directions, eps):
    return [a + eps * d for a, d in zip(arrays, directions, strict=True)]


def check(rng, f, *shapes, positive=False):
    """f's derivative, its two forms, and the derivative of its derivative, in float64 without rounding."""
    with fb.tracks("reference"):
        draw = rng.standard_normal
        arrays = [np.abs(draw(s)) + 0.5 if positive else draw(s) for s in shapes]
        directions = [draw(s) for s in shapes]
        g = draw(f(*map(Variable, arrays)).shape)
        _, fused = gradients(f, arrays, g)
        variables, taped = gradients(f, arrays, g, create_graph=True)
        for a, b, x in zip(fused, taped, arrays, strict=True):
            assert a.shape == b.shape == x.shape and a.dtype == x.dtype
            close(a.data, b.data, rtol=1e-10)

        def loss(values):
            with no_grad():
                return float((f(*map(Variable, values)).data * g).sum())

        for i, x in enumerate(arrays):  # each input alone, along a random direction
            along = [d if j == i else np.zeros_like(d) for j, d in enumerate(directions)]
            want = (loss(shifted(arrays, along, EPS)) - loss(shifted(arrays, along, -EPS))) / (2 * EPS)
            close(
                float((fused[i].data * directions[i]).sum()), want, rtol=1e-5, atol=1e-6 * max(1, x.size**0.5)
            )
        if not any(t.requires_grad for t in taped):
            return  # linear in all inputs: the second derivative is zero and the tape knows it
        product = sum((t * d).sum() for t, d in zip(taped, directions, strict=True))
        second = grad(product, variables)
        up = gradients(f, shifted(arrays, directions, EPS), g)[1]
        down = gradients(f, shifted(arrays, directions, -EPS), g)[1]
        for h, u, d in zip(second, up, down, strict=True):
            close(h.data, (u.data - d.data) / (2 * EPS), rtol=2e-5, atol=1e-6)


MASK = np.array([True, False, True])
OPS = {
    "add": (lambda a, b: a + b, (3, 4), (4,)),
    "sub": (lambda a, b: a - b, (3, 1), (2, 3, 4)),
    "rsub": (lambda a: 2.0 - a, (3,)),
    "mul": (lambda a, b: a * b, (3, 4), (3, 1)),
    "mul_self": (lambda a: a * a * a, (3,)),
    "div": (lambda a, b: a / (b * b + 1.0), (3, 4), (4,)),
    "rdiv": (lambda a: 1.0 / (a * a + 1.0), (3,)),
    "neg": (lambda a: -a * a, (3,)),
    "power": (lambda a: a**3, (3, 2)),
    "power_2": (lambda a: a**2, (3, 2)),
    "exp": (F.exp, (3, 2)),
    "tanh": (F.tanh, (3, 2)),
    "sigmoid": (F.sigmoid, (3, 2)),
    "softplus": (F.softplus, (3, 2)),
    "log_sigmoid": (F.log_sigmoid, (3, 2)),
    "silu": (F.silu, (3, 2)),
    "where": (lambda a, b: F.where(MASK, a * a, b), (3,), (2, 1)),
    "clip": (lambda a: F.clip(a * a, 0.2, 1.0), (8,)),
    "sum": (lambda a: F.sum(a * a, (0, 2)), (2, 3, 4)),
    "mean": (lambda a: F.mean(a * a, 1, keepdims=True), (2, 3, 4)),
    "mean_squared_error": (lambda a, b: F.mean_squared_error(a, b, axis=(1, 2)), (2, 3, 4), (2, 3, 4)),
    "softmax": (lambda a: F.softmax(a, axis=1), (2, 3, 2)),
    "log_softmax": (F.log_softmax, (2, 5)),
    "reshape": (lambda a: (a * a).reshape(3, -1), (2, 3, 2)),
    "transpose": (lambda a: (a * a).transpose(2, 0, 1), (2, 3, 4)),
    "T": (lambda a: (a * a).T, (2, 3)),
    "getitem": (lambda a: (a * a)[1:, None, ..., 0], (3, 2, 2)),
    "pad": (lambda a: F.pad(a * a, [(1, 0), (0, 2)]), (2, 3)),
    "concat": (lambda a, b: F.concat([a * a, b, a], axis=-1), (2, 3), (2, 1)),
    "broadcast_to": (lambda a: F.broadcast_to(a * a, (4, 2, 3)), (2, 1)),
    "matmul": (lambda a, b: a @ b, (2, 3, 4), (4, 5)),
    "matmul_batch": (F.matmul, (2, 3, 4), (2, 4, 5)),
    "linear": (F.linear, (2, 3, 4), (5, 4), (5,)),
    "linear_no_bias": (F.linear, (3, 4), (5, 4)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 4, 3, 2), (3, 3, 3, 2), (3,)),
    "conv2d_stride": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=((0, 1), (0, 1))),
        (1, 4, 4, 2),
        (3, 3, 3, 2),
        (3,),
    ),
    "conv2d_residual": (
        lambda x, w, r: F.conv2d(x, w, residual=r * r),
        (2, 3, 3, 2),
        (3, 1, 1, 2),
        (2, 3, 3, 3),
    ),
    "attention": (F.attention, (2, 3, 2, 4), (2, 3, 2, 4), (2, 3, 2, 4)),
    "attention_causal": (
        lambda q, k, v: F.attention(q, k, v, causal=True, scale=0.3),
        (1, 4, 1, 3),
        (1, 4, 1, 3),
        (1, 4, 1, 3),
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, w, b, 2), (2, 2, 3, 4), (4,), (4,)),
    "group_norm_silu": (lambda x, w, b: F.group_norm(x, w, b, 2, 1e-3, silu=True), (2, 3, 4), (4,), (4,)),
    "group_norm_shift": (
        lambda x, w, b, s: F.group_norm(x, w, b, 2, 1e-3, silu=True, shift=s),
        (2, 2, 2, 4),
        (4,),
        (4,),
        (2, 4),
    ),
    "upsample_nearest": (lambda x: F.upsample_nearest(x * x), (2, 2, 3, 2)),
    "upsample_conv": (F.upsample_conv, (2, 2, 3, 2), (3, 3, 3, 2), (3,)),
    "avg_pool2": (lambda x: F.avg_pool2(x * x), (1, 4, 2, 3)),
    "take": (lambda w: F.take(w * w, [[2, 0], [2, 2]]), (3, 4)),
}


@pytest.mark.parametrize("name", OPS)
def test_derivatives(name, rng):
    f, *shapes = OPS[name]
    check(rng, f, *shapes)


@pytest.mark.parametrize(
    "f", [F.log, F.sqrt, lambda a: a**0.5, lambda a: F.maximum(a, 1.0) * F.minimum(a, 1.5)]
)
def test_derivatives_of_positive_arguments(f, rng):
    check(rng, f, (3, 4), positive=True)


def test_every_operation_is_tested():
    used = {"log", "sqrt", "maximum", "minimum"}
    shared = {
        "stop_gradient",
        "full_like",
        "through_quantiser",
        "sum_to",
        "unslice",
    }  # tested below, or as adjoints
    named = {"broadcast_to", "concat", "getitem", "log_sigmoid", "log_softmax"}
    assert set(F.__all__) - set(OPS) - used - shared - named == set()


def test_straight_through(rng):
    x = Variable(rng.standard_normal((3, 32)).astype(np.float32), requires_grad=True)
    y = F.through_quantiser(x)
    assert 0 < np.abs(y.data - x.data).max() < 1
    assert np.array_equal(y.data, fb.dequantize(fb.quantize(x.data, outer="row", search="fast")))
    g = rng.standard_normal(x.shape).astype(np.float32)
    assert np.array_equal(grad(y, [x], g=g)[0].data, g)


shapes = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@given(shape=shapes, data=st.data())
def test_broadcast_gradients(shape, data):
    """Any operand that NumPy broadcasts gets a gradient of its own shape: the sum over what was repeated."""
    keep = data.draw(st.integers(0, len(shape)))
    small = tuple(n if data.draw(st.booleans()) else 1 for n in shape[len(shape) - keep :])
    a, b = Variable(np.ones(shape), requires_grad=True), Variable(np.full(small, 2.0), requires_grad=True)
    for f in (F.add, F.sub, F.mul, F.div):
        ga, gb = grad(f(a, b), [a, b], g=np.ones(shape))
        assert ga.shape == a.shape and gb.shape == b.shape
        per_element = {F.add: 1.0, F.sub: -1.0, F.mul: 1.0, F.div: -0.25}[f]
        np.testing.assert_allclose(gb.data, per_element * np.prod(shape) / max(1, np.prod(small)))


def test_shared_subexpressions_add_up(rng):
    x = Variable(rng.standard_normal(5), requires_grad=True)
    y = F.exp(x)
    (g,) = grad((y * y + y + x).sum(), [x])
    np.testing.assert_allclose(g.data, 2 * np.exp(2 * x.data) + np.exp(x.data) + 1, rtol=1e-12)


def test_gradients_of_intermediate_variables(rng):
    x = Variable(rng.standard_normal(4), requires_grad=True)
    y = x * 3.0
    gy, gx = grad((y * y).sum(), [y, x])
    np.testing.assert_allclose(gy.data, 2 * y.data)
    np.testing.assert_allclose(gx.data, 18 * x.data)


def test_a_borrowed_gradient_is_not_written(rng):
    """`add` hands the same array to both inputs; accumulating into one must not change the other."""
    x, y = (Variable(rng.standard_normal(4), requires_grad=True) for _ in range(2))
    s = x + y
    loss_gradient = np.ones(4)
    gx, gy = grad(s + x + x, [x, y], g=loss_gradient)
    assert (
        gx.data.tolist() == [3.0] * 4
        and gy.data.tolist() == [1.0] * 4
        and loss_gradient.tolist() == [1.0] * 4
    )


def test_backward_accumulates_in_place():
    w = Variable(np.ones(3, np.float32), requires_grad=True)
    buffer = w.grad = np.zeros(3, np.float32)
    for _ in range(2):
        backward((w * 2.0).sum())
    assert w.grad is buffer and buffer.tolist() == [4.0] * 3


def test_backward_does_not_alias_leaves():
    a, b = (Variable(np.ones(2), requires_grad=True) for _ in range(2))
    (a + b).sum().backward()
    a.grad[0] = 7.0
    assert b.grad.tolist() == [1.0, 1.0]


def test_no_grad_records_nothing_and_changes_nothing(rng):
    w = Variable(rng.standard_normal((4, 4)).astype(np.float32), requires_grad=True)
    with no_grad():
        silent = F.silu(w @ w)
    recorded = F.silu(w @ w)
    assert not silent.requires_grad and recorded.requires_grad
    assert np.array_equal(silent.data, recorded.data)


def test_unneeded_gradients_are_not_computed():
    x, w = np.ones((2, 3)), Variable(np.ones((4, 3)), requires_grad=True)
    y = F.linear(x, w)
    backward(y.sum())
    assert w.grad.shape == (4, 3)
    constant = Variable(np.ones(2))
    assert not (constant * 2.0).requires_grad


def test_graph_is_freed_on_the_way():
    w = Variable(np.ones(4), requires_grad=True)
    kept = np.full(4, 2.0)
    inside = Variable(kept) * w
    probe = weakref.ref(inside._node)
    loss = (inside * inside).sum()
    del inside
    loss.backward()
    gc.collect()
    assert probe() is None
    with pytest.raises(RuntimeError, match="already used and freed.*retain_graph=True"):
        loss.backward()


def test_retain_graph():
    w = Variable(np.ones(2), requires_grad=True)
    loss = (w * w).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert w.grad.tolist() == [4.0, 4.0]


def test_deep_graphs_need_no_deep_stack():
    x = Variable(np.ones(1), requires_grad=True)
    y = x
    for _ in range(5000):
        y = y + 1.0
    assert grad(y.sum(), [x])[0].data.tolist() == [1.0]


def test_constants_take_the_variables_dtype():
    x = Variable(np.ones(3, np.float32), requires_grad=True)
    for y in (x * np.ones(3), np.ones(3) * x, x + np.float64(1), x / [1.0, 2.0, 3.0], 2.0 - x, x**2):
        assert y.dtype == np.float32 and isinstance(y, Variable)


def test_independent_variable_gets_zeros():
    x, z = (Variable(np.ones(3), requires_grad=True) for _ in range(2))
    assert grad((x * x).sum(), [z])[0].data.tolist() == [0.0] * 3


def test_stop_gradient():
    x = Variable(np.full(2, 3.0), requires_grad=True)
    assert grad((F.stop_gradient(x) * x).sum(), [x])[0].data.tolist() == [3.0, 3.0]


def test_replaced_data_is_noticed_by_second_derivatives():
    x = Variable(np.ones(2), requires_grad=True, name="x")
    loss = (x * x * x).sum()
    x.data = np.zeros(2)
    with pytest.raises(RuntimeError, match="data of x was replaced"):
        grad(loss, [x], create_graph=True)


ERRORS = [
    (lambda x: backward(x * 2.0), ShapeError, r"loss has shape \(2, 3\).*pass g"),
    (
        lambda x: grad(x * 2.0, [x], g=np.ones(3)),
        ShapeError,
        r"g has shape \(3,\) but the loss has shape \(2, 3\)",
    ),
    (lambda x: backward(Variable(np.ones(()))), RuntimeError, "no variable with requires_grad"),
    (lambda x: grad(x.sum(), [Variable(np.ones(2))]), TypeError, "takes no gradient"),
    (lambda x: Variable(np.ones(2, int), requires_grad=True), TypeError, "int64.*astype"),
    (lambda x: Variable("abc"), TypeError, "builtins.str is no array"),
    (lambda x: x[np.array([0, 1])], TypeError, "use take"),
    (lambda x: F.take(x, [2]), ShapeError, "reach from 2 to 2.*2 rows"),
    (lambda x: F.take(x, [-1]), ShapeError, "reach from -1"),
    (lambda x: F.take(x, [0.5]), ShapeError, "float64"),
    (lambda x: F.concat([x, x[:1]], axis=1), ShapeError, "axis 1 only"),
    (lambda x: F.mean_squared_error(x, np.ones(3)), ShapeError, r"\(2, 3\).*\(3,\)"),
    (lambda x: F.group_norm(x, np.ones(3), np.zeros(3), 2), ShapeError, "3 channels.*2 groups"),
    (lambda x: F.avg_pool2(np.ones((1, 3, 2, 1))), ShapeError, "3 x 2 pixels"),
    (lambda x: F.matmul(x, np.ones(3)), ShapeError, "at least 2 axes"),
    (lambda x: nn.Module()(x), TypeError, "define forward"),
]


@pytest.mark.parametrize("call, error, message", ERRORS, ids=range(len(ERRORS)))
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(Variable(np.ones((2, 3)), requires_grad=True))
