"""fp4bf16_attention and its gradient on a GPU against float64, beside NumPy's own attention in BF16."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.gpu
BF16 = np.dtype(ml_dtypes.bfloat16)
POISON = np.frombuffer(b"\xa5\xa5", BF16)[0]

#: (n, q_tokens, k_tokens, heads, dim): the UNet's two, ragged, cross-attention, one query, one key, one of
#: everything, channels that no tile divides, more tokens than a tile of keys
CASES = [
    (3, 256, 256, 1, 256), (5, 16, 16, 1, 256), (2, 100, 100, 2, 64), (2, 300, 77, 3, 128), (1, 1, 19, 2, 16),
    (2, 70, 1, 1, 32), (1, 1, 1, 1, 1), (2, 33, 65, 2, 5), (1, 129, 250, 1, 200), (1, 200, 700, 2, 48),
    (1, 40, 257, 1, 512), (2, 64, 64, 1, 320), (1, 130, 256, 2, 72), (70, 9, 16, 2, 8),
]  # fmt: skip
#: "odd": addresses and strides that the copy engine does not take, so that the simple kernel runs
LAYOUTS = ["packed", "columns", "heads first", "odd"]
INPUTS, ROWS, GRADIENTS = ("q", "k", "v"), ("out",), ("dq", "dk", "dv")


@pytest.fixture(autouse=True)
def _free(gpu):
    yield
    gpu.free()


# ---- memory
def place(layout: str, shape) -> tuple[int, tuple[int, ...]]:
    """(offset, strides) in elements of an array (n, tokens, heads, dim)."""
    _, tokens, heads, dim = shape
    row = heads * dim
    return {
        "packed": (0, (tokens * row, row, dim, 1)),
        "columns": (row, (tokens * 3 * row, 3 * row, dim, 1)),
        "heads first": (0, (heads * tokens * dim, dim, tokens * dim, 1)),
        "odd": (1, (tokens * (row + 3) + 5, row + 3, dim, 1)),
    }[layout]


def buffer(layout: str, shape, fill) -> tuple[np.ndarray, np.ndarray]:
    """(all the memory, the array in it)."""
    offset, strides = place(layout, shape)
    size = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    held = np.full(max(size, 1) + 7, fill, BF16)
    view = np.lib.stride_tricks.as_strided(held[offset:], shape, [2 * s for s in strides])
    return held, view


class Attention:
    """One call: operands on the host and on the device, NaN between their tokens; its float64 results."""

    def __init__(self, library, gpu, rng, n, q_tokens, k_tokens, heads, dim, *, layout="packed", causal=False,
                 scale=None, spread=1.0, v=None):  # fmt: skip
        self.loaded, self.gpu, self.layout, self.causal = library, gpu, layout, causal
        self.scale = dim**-0.5 if scale is None else scale
        rows, keys = (n, q_tokens, heads, dim), (n, k_tokens, heads, dim)
        self.shapes = {name: rows for name in ("q", "out", "g", "dq")}
        self.shapes |= {name: keys for name in ("k", "v", "dk", "dv")}
        self.x = {name: rng.standard_normal(self.shapes[name]) for name in ("q", "k", "v", "g")}
        self.x["q"] = self.x["q"] * spread
        if v is not None:
            self.x["v"] = np.full(keys, v)
        self.x = {name: x.astype(BF16) for name, x in self.x.items()}
        self.fields = dict(n=n, heads=heads, q_tokens=q_tokens, k_tokens=k_tokens, dim=dim,
                           scale=self.scale, causal=int(causal))  # fmt: skip
        for name, x in self.x.items():
            held, view = buffer(layout, x.shape, np.nan)
            view[...] = x
            self._point(name, gpu.put(held))

    def _point(self, name: str, address: int) -> None:
        offset, strides = place(self.layout, self.shapes[name])
        self.fields |= {name: address + 2 * offset, f"{name}_strides": list(strides[:3])}

    def args(self, **fields):
        kinds = dict(self.loaded.ffi.typeof("fp4bf16_attention_args").fields)
        values = self.fields | fields
        return self.loaded.ffi.new("fp4bf16_attention_args*", {
            name: self.loaded.ffi.cast(kinds[name].type, x) if kinds[name].type.kind == "pointer" else x
            for name, x in values.items()
        })  # fmt: skip

    def call(self, function: str, written: tuple[str, ...]) -> list[np.ndarray]:
        """The arrays `written`, poisoned before, after a look at everything around them."""
        held = {}
        for name in written:
            held[name] = buffer(self.layout, self.shapes[name], POISON)[0]
            address = self.gpu.put(held[name])
            self._point(name, address)
            held[name] = address, held[name].size
        self.loaded.call(function, self.args(), 0)
        found = []
        for name, (address, size) in held.items():
            got = self.gpu.get(address, (size,), BF16)
            offset, strides = place(self.layout, self.shapes[name])
            view = np.lib.stride_tricks.as_strided(got[offset:], self.shapes[name], [2 * s for s in strides])
            found.append(view.astype(np.float64))
            view[...] = POISON
            assert (got.view(np.uint8) == 0xA5).all(), f"wrote beside {name}"
        return found

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse)."""
        n, heads, rows = (self.fields[name] for name in ("n", "heads", "q_tokens"))
        self.fields["lse"] = self.gpu.empty(4 * n * heads * rows)
        (out,) = self.call("attention", ROWS)
        return out, self.gpu.get(self.fields["lse"], (n, heads, rows), np.float32).astype(np.float64)

    def backward(self) -> list[np.ndarray]:
        """dq, dk, dv after the forward pass."""
        size = self.loaded.lib.fp4bf16_attention_backward_workspace_size(self.args())
        assert size >= 0
        self.fields["workspace"] = self.gpu.empty(size)
        return self.call("attention_backward", GRADIENTS)

    def reference(self, low: bool):
        """Everything in float64, or (low) with float32 sums and BF16 numbers between the products: results by
        name, and bounds of their elements' errors."""
        kind = np.float32 if low else np.float64
        rounded = (lambda x: x.astype(BF16).astype(kind)) if low else (lambda x: x)
        q, k, v, g = (self.x[name].astype(kind).swapaxes(1, 2) for name in ("q", "k", "v", "g"))
        s = kind(self.scale) * (q @ k.swapaxes(-1, -2))
        if self.causal:
            s = np.where(np.tri(*s.shape[2:], dtype=bool), s, -np.inf).astype(kind)
        top = s.max(-1, keepdims=True)
        e = np.exp(s - top)
        total = e.sum(-1, keepdims=True)
        p, lse = rounded(e / total), (top + np.log(total))[..., 0]
        dp = g @ v.swapaxes(-1, -2)
        delta = (p * dp).sum(-1, keepdims=True)
        ds = rounded(p * (dp - delta))
        results = {"out": p @ v, "dq": kind(self.scale) * (ds @ k), "dv": p.swapaxes(-1, -2) @ g,
                   "dk": kind(self.scale) * (ds.swapaxes(-1, -2) @ q)}  # fmt: skip
        # delta is made of `out` as the forward wrote it: rounding that, 2^-9 each, is not bound by delta
        rounding = (abs(g) * abs(results["out"])).sum(-1, keepdims=True) / 4
        size = abs(self.scale) * p * (abs(dp) + abs(delta) + rounding)
        sizes = {"out": p @ abs(v), "dq": size @ abs(k), "dk": size.swapaxes(-1, -2) @ abs(q),
                 "dv": p.swapaxes(-1, -2) @ abs(g)}  # fmt: skip
        flat = {name: rounded(x).swapaxes(1, 2).astype(np.float64) for name, x in results.items()}
        return flat, {name: x.swapaxes(1, 2) for name, x in sizes.items()}, lse

    def check(self, backward: bool = True) -> None:
        """At most twice the error of NumPy in BF16 on the whole, where that has none one rounding; each
        element within what rounding its weights (2^-9 each, in P, in dS, in their row's sum and in `out`, of
        which the backward makes delta) can do."""
        want, sizes, lse = self.reference(False)
        low, _, _ = self.reference(True)
        out, found_lse = self.forward()
        # a row's sum is that of rounded weights; float32 holds 2^-24 of a large score
        np.testing.assert_allclose(found_lse, lse, rtol=2e-6, atol=2.0**-9)
        got = {"out": out}
        if backward:
            got |= zip(GRADIENTS, self.backward(), strict=True)
        for name, y in got.items():
            norm = np.linalg.norm(want[name])
            error, numpy_error = (np.linalg.norm(x[name] - want[name]) for x in (got, low))
            tiny = 2.0**-16 * np.linalg.norm(sizes[name])  # where all cancels: float32 sums
            assert error <= 2 * max(numpy_error, 2.0**-10 * norm) + tiny, (
                f"{name}: {error / norm:.2e}, NumPy's {numpy_error / norm:.2e}"
            )
            bound = 2.0**-8 * abs(want[name]) + 2.0**-7 * sizes[name] + 1e-30
            worst = np.unravel_index(np.argmax(abs(y - want[name]) / bound), y.shape)
            far = f"{name}{worst}: {y[worst]}, not {want[name][worst]}"
            assert (abs(y - want[name]) <= bound)[worst], far


# ---- values
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(library, gpu, rng, case, layout):
    for causal in (False, True):
        Attention(library, gpu, rng, *case, layout=layout, causal=causal).check()


@pytest.mark.parametrize("layout", ["packed", "odd"])
@pytest.mark.parametrize("scale", [0.0, -0.25, 1.0, 1e-4])
def test_scale(library, gpu, rng, layout, scale):
    for case in ((2, 256, 256, 1, 256), (4, 16, 16, 2, 32)):
        Attention(library, gpu, rng, *case, layout=layout, scale=scale).check()


@pytest.mark.parametrize("layout", ["columns", "odd"])
def test_peaked_weights(library, gpu, rng, layout):
    """Scores of a hundred and more: one key has nearly all the weight."""
    for case in ((2, 256, 256, 1, 256), (3, 16, 16, 1, 64)):
        Attention(library, gpu, rng, *case, layout=layout, spread=30.0).check(backward=False)


@pytest.mark.parametrize("layout", ["columns", "odd"])
def test_more_work_than_multiprocessors(library, gpu, rng, layout):
    """Several images a thread block: what one leaves behind must not reach the next."""
    Attention(library, gpu, rng, 150, 256, 256, 1, 64, layout=layout).check()
    Attention(library, gpu, rng, 1500, 16, 16, 1, 64, layout=layout).check()


# ---- invariants
@pytest.mark.parametrize("layout", ["packed", "odd"])
@pytest.mark.parametrize("keys", [1, 16, 77, 256, 300])
@pytest.mark.parametrize("dim", [16, 256])
def test_constant_values_come_back(library, gpu, rng, layout, keys, dim):
    """The weights of a row sum to one after their rounding: v = 1 gives 1 whatever the scores are."""
    for causal in (False, True):
        options = dict(layout=layout, causal=causal, spread=4.0, v=1.0)
        out, _ = Attention(library, gpu, rng, 2, 130, keys, 1, dim, **options).forward()
        assert (out == 1).all()


@pytest.mark.parametrize("layout", ["packed", "odd"])
@pytest.mark.parametrize("keys", [1, 16, 77, 256, 300])
def test_uniform_scores(library, gpu, rng, layout, keys):
    """scale = 0: lse = ln(keys), and every query gets the mean of v."""
    case = Attention(library, gpu, rng, 2, 40, keys, 2, 64, layout=layout, scale=0.0)
    out, lse = case.forward()
    np.testing.assert_allclose(lse, np.log(keys), rtol=1e-6, atol=1e-6)
    mean = case.x["v"].astype(np.float64).mean(1, keepdims=True)
    np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), rtol=2.0**-8, atol=1e-6)
    dq, dk, _ = case.backward()
    assert (dq == 0).all() and (dk == 0).all()


@pytest.mark.parametrize("layout", ["packed", "odd"])
def test_causal_edges(library, gpu, rng, layout):
    """Query 0 sees key 0 alone; what later keys hold reaches no earlier query."""
    for case in ((2, 256, 256, 1, 256), (3, 16, 16, 2, 32), (1, 130, 70, 1, 64), (1, 70, 130, 1, 64)):
        first = Attention(library, gpu, rng, *case, layout=layout, causal=True)
        out, _ = first.forward()
        np.testing.assert_array_equal(out[:, 0], first.x["v"][:, 0].astype(np.float64))
        half = min(case[1], case[2]) // 2
        changed = {}
        for name in ("k", "v"):
            first.x[name][:, half:] = rng.standard_normal(first.x[name][:, half:].shape).astype(BF16)
            held, view = buffer(layout, first.shapes[name], np.nan)
            view[...] = first.x[name]
            changed[name] = gpu.put(held)
            first._point(name, changed[name])
        other, _ = first.forward()
        np.testing.assert_array_equal(out[:, :half], other[:, :half])
        assert (out[:, half:] != other[:, half:]).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits_twice(library, gpu, rng, layout):
    for case in ((20, 256, 256, 1, 256), (40, 16, 16, 1, 256), (2, 130, 300, 2, 40)):
        a = Attention(library, gpu, rng, *case, layout=layout)
        first, second = ([*a.forward(), *a.backward()] for _ in range(2))
        for x, y in zip(first, second, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("layout", ["packed", "odd"])
def test_nan_stays_in_its_image_and_head(library, gpu, rng, layout):
    for case in ((3, 256, 256, 2, 64), (3, 16, 16, 2, 64)):
        a = Attention(library, gpu, rng, *case, layout=layout)
        clean, _ = a.forward()
        a.x["k"][1, 3, 0, 5] = np.nan
        held, view = buffer(layout, a.shapes["k"], np.nan)
        view[...] = a.x["k"]
        a._point("k", gpu.put(held))
        out, _ = a.forward()
        assert np.isnan(out[1, :, 0]).all()
        out[1, :, 0] = clean[1, :, 0]
        np.testing.assert_array_equal(out, clean)


# ---- edges
def test_empty(library, gpu, rng):
    for case in ((0, 4, 4, 1, 16), (2, 0, 4, 1, 16), (2, 4, 4, 0, 16)):
        a = Attention(library, gpu, rng, *case)
        a.forward()
        dq, dk, dv = a.backward()
        assert not dq.size and (dk == 0).all() and (dv == 0).all()


@pytest.mark.parametrize("layout", ["packed", "odd"])
def test_no_keys(library, gpu, rng, layout):
    """A sum over nothing: zeros, and the logarithm of zero."""
    case = Attention(library, gpu, rng, 2, 5, 0, 1, 16, layout=layout)
    out, lse = case.forward()
    assert (out == 0).all() and (lse == -np.inf).all()
    dq, dk, dv = case.backward()
    assert (dq == 0).all() and not dk.size and not dv.size


def test_captured_in_a_graph(library, gpu, rng):
    rt = gpu.rt
    a = Attention(library, gpu, rng, 4, 256, 256, 1, 256)
    want = [a.forward()[0], *a.backward()]
    stream = gpu.check(rt.cudaStreamCreate())
    gpu.check(rt.cudaStreamBeginCapture(stream, rt.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal))
    args = a.args()
    library.call("attention", args, int(stream))
    library.call("attention_backward", args, int(stream))
    graph = gpu.check(rt.cudaStreamEndCapture(stream))
    run = gpu.check(rt.cudaGraphInstantiate(graph, 0))
    for name in (*ROWS, *GRADIENTS):
        gpu.check(rt.cudaMemset(a.fields[name], 0xA5, want[0].size * 2))
    gpu.check(rt.cudaGraphLaunch(run, stream))
    gpu.check(rt.cudaStreamSynchronize(stream))
    for name, y in zip((*ROWS, *GRADIENTS), want, strict=True):
        got = gpu.get(a.fields[name], (y.size + 7,), BF16)[: y.size].reshape(y.shape)
        np.testing.assert_array_equal(got.astype(np.float64), y)
    gpu.check(rt.cudaGraphExecDestroy(run))
    gpu.check(rt.cudaStreamDestroy(stream))


# ---- misuse
def test_bad_arguments_are_refused_and_nothing_sticks(library, gpu, rng):
    a = Attention(library, gpu, rng, 2, 20, 20, 2, 16)
    a.forward()
    a.backward()
    q = a.fields["q"]
    forward = [
        (dict(dim=0), "dim is 0, but must be 1 to 512"), (dict(dim=513), "dim is 513"),
        (dict(n=-1), "n is -1"), (dict(causal=2), "causal is 2"), (dict(q=0), "q is NULL"),
        (dict(v=a.fields["v"] + 1), "v is 1 bytes past a multiple of 2"),
        (dict(scale=float("nan")), "scale is nan"), (dict(k_strides=[2**41, 32, 16]), "a stride of k is"),
        (dict(out_strides=[0, 32, 16]), "out overlaps itself"), (dict(out_strides=[640, 24, 16]), "overlaps"),
        (dict(lse=a.fields["lse"] + 2), "lse is 2 bytes past a multiple of 4"),
        (dict(heads=2**31), "heads is"), (dict(n=2**30, heads=2**30), r"n \* heads \* tokens"),
    ]  # fmt: skip
    backward = [
        (dict(lse=0), "lse is NULL"), (dict(g=0), "g is NULL"),
        (dict(dk_strides=[640, 0, 16]), "dk overlaps"), (dict(workspace=0), "workspace is NULL"),
        (dict(workspace=q + 2), "workspace is 2 bytes past"),
    ]  # fmt: skip
    for function, refused in (("attention", forward), ("attention_backward", forward + backward)):
        for fields, sentence in refused:
            if function == "attention_backward" and "out_strides" in fields:
                continue  # read there, not written
            with pytest.raises(ValueError, match=f"{function}: .*{sentence}"):
                library.call(function, a.args(**fields), 0)
    assert library.lib.fp4bf16_attention_backward_workspace_size(a.args(dim=0)) == -1
    gpu.check(gpu.rt.cudaDeviceSynchronize())
    a.check()
