"""Arguments of the convolutions of the compiled library: each mistake is a sentence before any launch."""

from __future__ import annotations

import pytest
from conv_kernels import conv_args

FORWARD = dict(
    n=2, h=6, w=5, oh=6, ow=5, o=8, kh=3, kw=3, stride=1, top=1, left=1, c8=16, c16=8, x8=64, w8=64, x16=64,
    w16=64, x8_strides=[480, 80, 16], x16_strides=[240, 40, 8], w8_stride=144, w16_stride=72, alpha=1.0, d=64,
    d_dtype=0, d_strides=[240, 40, 8],
)  # fmt: skip
DGRAD = dict(
    n=2, h=6, w=5, c=8, oh=6, ow=5, o=8, kh=3, kw=3, stride=1, top=1, left=1, g=64, w16=64, dx=64,
    g_strides=[240, 40, 8], w16_stride=72, dx_dtype=1, dx_strides=[240, 40, 8],
)  # fmt: skip
WGRAD = dict(
    n=2, h=6, w=5, c=8, oh=6, ow=5, o=8, kh=3, kw=3, stride=1, top=1, left=1, g=64, x=64, dw=64,
    g_strides=[240, 40, 8], x_strides=[240, 40, 8], dw_stride=72, workspace=64,
)  # fmt: skip

SHARED = [
    (dict(n=-1), "n is -1, but must be 0 to 2147482624"),
    (dict(h=-2), "h is -2"),
    (dict(w=1 << 40), "w is 1099511627776"),
    (dict(oh=1 << 31), "oh is 2147483648"),
    (dict(ow=-1), "ow is -1"),
    (dict(o=1 << 31), "o is 2147483648"),
    (dict(kh=0), "kh is 0, but must be 1 to 32768"),
    (dict(kw=1 << 20), "kw is 1048576"),
    (dict(stride=0), "stride is 0"),
    (dict(top=-(1 << 40)), "top is -1099511627776"),
    (dict(left=1 << 40), "left is 1099511627776"),
]
FORWARD_MISTAKES = SHARED + [
    (dict(c8=-1), "c8 is -1"),
    (dict(c16=1 << 40), "c16 is"),
    (dict(x16_on_output=2), "x16_on_output is 2, but must be 0 to 1"),
    (dict(accumulate=2), "accumulate is 2"),
    (dict(activation=3), "activation is 3"),
    (dict(config=-1), "config is -1"),
    (dict(d_dtype=3), "d_dtype is 3"),
    (dict(x8=0), "x8 is NULL"),
    (dict(w8=0), "w8 is NULL"),
    (dict(x16=0), "x16 is NULL"),
    (dict(x16=65), "x16 is 1 bytes past a multiple of 2"),
    (dict(w16=0), "w16 is NULL"),
    (dict(d=0), "d is NULL"),
    (dict(d=66), "d is 2 bytes past a multiple of 4"),
    (dict(w8_stride=143), "row stride of w8 is 143 elements, less than its 144 columns"),
    (dict(w16_stride=71), "row stride of w16 is 71 elements, less than its 72"),
    (dict(x8_strides=[-480, 80, 16]), r"x8_strides\[0\] is -480 elements"),
    (dict(x16_strides=[240, 1 << 50, 8]), r"x16_strides\[1\] is 1125899906842624 elements"),
    (dict(d_strides=[240, 40, 7]), r"elements of d overlap: d_strides\[2\] is 7 elements.* spans 8"),
    (dict(d_strides=[240, 39, 8]), r"d overlap: d_strides\[1\] is 39 elements.* spans 40"),
    (dict(d_strides=[200, 40, 8]), r"d overlap: d_strides\[0\] is 200 elements.* spans 240"),
    (dict(d_strides=[0, 40, 8]), r"d overlap: d_strides\[0\] is 0"),
    (dict(image_scale=66), "image_scale is 2 bytes past a multiple of 4"),
    (dict(col_scale=65), "col_scale is 1 bytes past"),
    (dict(image_scale_step=2), "image_scale_step is 2, but must be 0 to 1"),
    (dict(col_scale_step=-1), "col_scale_step is -1"),
    (dict(bias=66), "bias is 2 bytes past a multiple of 4"),
    (dict(bias2=65, bias_dtype=1), "bias2 is 1 bytes past a multiple of 2"),
    (dict(bias2=64, bias_dtype=3), "bias_dtype is 3"),
    (dict(image_bias=64, image_bias_stride=7), "row stride of image_bias is 7 elements, less than its 8"),
    (dict(image_bias=66, image_bias_stride=8), "image_bias is 2 bytes past a multiple of 4"),
    (dict(image_bias=64, image_bias_dtype=7), "image_bias_dtype is 7"),
    (dict(residual=64, residual_dtype=5), "residual_dtype is 5"),
    (dict(residual=66, residual_strides=[240, 40, 8]), "residual is 2 bytes past a multiple of 4"),
    (dict(residual=64, residual_strides=[240, -40, 8]), r"residual_strides\[1\] is -40"),
    (dict(n=1 << 30, oh=1 << 20), r"d \(1073741824, 1048576, 5, 8\) has more than 2\^40 elements"),
]
DGRAD_MISTAKES = SHARED + [
    (dict(c=-1), "c is -1"),
    (dict(config=-1), "config is -1"),
    (dict(dx_dtype=3), "dx_dtype is 3"),
    (dict(g=0), "g is NULL"),
    (dict(w16=0), "w16 is NULL"),
    (dict(dx=0), "dx is NULL"),
    (dict(g=65), "g is 1 bytes past a multiple of 2"),
    (dict(w16_stride=71), "row stride of w16 is 71 elements, less than its 72"),
    (dict(dx_strides=[240, 40, 4]), "elements of dx overlap"),
    (dict(g_strides=[240, -1, 8]), r"g_strides\[1\] is -1"),
    (dict(residual=65, residual_dtype=1), "residual is 1 bytes past"),
    (dict(residual=64, residual_dtype=4), "residual_dtype is 4"),
]
WGRAD_MISTAKES = SHARED + [
    (dict(c=-1), "c is -1"),
    (dict(accumulate=2), "accumulate is 2, but must be 0 to 1"),
    (dict(g=0), "g is NULL"),
    (dict(x=0), "x is NULL"),
    (dict(x=65), "x is 1 bytes past a multiple of 2"),
    (dict(dw=0), "dw is NULL"),
    (dict(dw=66), "dw is 2 bytes past a multiple of 4"),
    (dict(dw_stride=71), "row stride of dw is 71 elements, less than its 72 columns"),
    (dict(db=65), "db is 1 bytes past a multiple of 4"),
    (dict(x_strides=[-240, 40, 8]), r"x_strides\[0\] is -240"),
    (dict(g_strides=[240, 40, 1 << 60]), r"g_strides\[2\] is 1152921504606846976"),
    (dict(o=1 << 30, c=1 << 20), r"dw \(1073741824, 3, 3, 1048576\) has more than 2\^40 elements"),
    (dict(n=1 << 30, oh=1 << 20), "has more than 2.40 pixels"),
]
GOOD = (FORWARD, DGRAD, WGRAD)
CASES = [
    *(("conv2d", FORWARD, *case) for case in FORWARD_MISTAKES),
    *(("conv2d_dgrad", DGRAD, *case) for case in DGRAD_MISTAKES),
    *(("conv2d_wgrad", WGRAD, *case) for case in WGRAD_MISTAKES),
]


@pytest.mark.parametrize("simple", [False, True], ids=["", "simple"])
@pytest.mark.parametrize(
    "name, good, fields, sentence", CASES, ids=lambda x: "" if x in GOOD else str(x)[:60]
)
def test_mistakes_are_refused_before_any_launch(library, name, good, fields, sentence, simple):
    name = name + "_simple" * simple
    with pytest.raises(ValueError, match=f"^{name}: .*{sentence}"):
        library.call(name, conv_args(library, name, **good | fields), 0)
    library.call(name, conv_args(library, name, **good | dict(n=0, o=0)), 0)  # no error is left behind


@pytest.mark.parametrize("name", ["conv2d", "conv2d_dgrad", "conv2d_wgrad"])
@pytest.mark.parametrize("simple", ["", "_simple"])
def test_no_arguments_at_all(library, name, simple):
    with pytest.raises(ValueError, match=f"^{name}{simple}: args is NULL"):
        library.call(name + simple, library.ffi.NULL, 0)


def test_empty_results_need_no_device(library):
    for axis in ("n", "oh", "ow", "o"):
        library.call("conv2d", conv_args(library, "conv2d", **FORWARD | {axis: 0, "x8": 0, "d": 0}), 0)
    for axis in ("n", "h", "w", "c"):
        library.call("conv2d_dgrad", conv_args(library, "conv2d_dgrad", **DGRAD | {axis: 0, "g": 0}), 0)
    library.call("conv2d_wgrad", conv_args(library, "conv2d_wgrad", **WGRAD | dict(o=0, g=0, dw=0)), 0)


def test_strides_of_single_elements_are_not_read(library):
    """One picture of one pixel: any strides do; that it gets past the checks shows in the next mistake."""
    fields = dict(n=1, h=1, w=1, oh=1, ow=1, x8_strides=[-1, -1, -1], x16_strides=[1, 0, -5],
                  d_strides=[0, -1, 0], bias=66)  # fmt: skip
    with pytest.raises(ValueError, match="bias is 2 bytes past"):
        library.call("conv2d", conv_args(library, "conv2d", **FORWARD | fields), 0)


def workspace(library, **fields) -> int:
    return library.lib.fp4bf16_conv2d_wgrad_workspace_size(
        conv_args(library, "conv2d_wgrad", **WGRAD | fields)
    )


def test_workspace_depends_on_the_shape_alone(library):
    from fp4bf16.backends import cuda

    layer = dict(n=256, h=16, w=16, c=256, oh=16, ow=16, o=256)
    size = workspace(library, **layer)
    assert size == workspace(library, **layer, g=0, x=0, dw=0, workspace=0, g_strides=[1, 1, 1])
    assert workspace(library, kh=0) == -1
    assert workspace(library, o=1 << 30, c=1 << 20) == -1
    assert workspace(library, n=0) == workspace(library, o=0) == workspace(library, c=0) == 0
    if not cuda.devices():  # sm_90's
        assert size % (4 * 256 * 9 * 256) == 0  # runs of (o, taps, c) FP32
        assert 2 <= size // (4 * 256 * 9 * 256) <= 132
        with_sums = workspace(library, **layer, db=64) - size
        assert with_sums > 0
        assert with_sums % (4 * 256) == 0
        many = layer | dict(o=8192, c=4096)
        assert workspace(library, **many) == 4 * 8192 * 9 * 4096  # tiles enough: one run


def test_names_of_configurations(library):
    from fp4bf16.backends import cuda

    def name(number, **fields):
        args = conv_args(library, "conv2d", **FORWARD | fields)
        return library._text(library.lib.fp4bf16_conv2d_config(args, number))

    assert name(0) != ""
    assert name(-1) == name(10**6) == name(0, kh=0) == ""
    assert name(0, stride=3) == "simple"
    assert name(1, stride=3) == ""
    if not cuda.devices():
        assert name(0) != "simple"
        names = [name(i) for i in range(1, 1 + next(i for i in range(1, 100) if not name(i)))]
        assert names[-1] == ""
        assert len(set(names)) == len(names) > 1
        assert name(0) in names


#: Pictures, side, inputs, outputs, kernel, phases, sums: the fastest measured (bench/NOTES.md), FP4 with
#: fast sums on one H200. The last took 37.0 us, 128x128 in turn 35.3, but that loses everywhere else.
MEASURED = [
    (1024, 16, 256, 768, 1, False, False, "256x128"),
    (1024, 32, 128, 128, 3, False, False, "256x128"),
    (1024, 32, 128, 128, 3, False, True, "256x128"),
    (1024, 16, 256, 256, 3, False, False, "128x256"),
    (1024, 16, 256, 256, 3, False, True, "128x256"),
    (1024, 8, 256, 256, 3, False, False, "128x256"),
    (1024, 4, 256, 256, 2, True, False, "256x128"),
]


@pytest.mark.parametrize("n, side, c, o, kernel, phases, sums, best", MEASURED)
def test_the_configuration_is_the_one_that_was_fastest(library, n, side, c, o, kernel, phases, sums, best):
    out = 2 * side if phases else side
    top = int(kernel > 1)
    fields = dict(
        n=n, h=side, w=side, oh=out, ow=out, o=o, kh=kernel, kw=kernel, top=top, left=top, c8=c, c16=0, x16=0,
        w16=0, x8_strides=[side * side * c, side * c, c], w8_stride=kernel**2 * c * (4 if phases else 1),
        d_strides=[out * out * o, out * o, o], d_dtype=1, accumulate=1, phases=int(phases),
        sums=64 if sums else 0,
    )  # fmt: skip
    args = conv_args(library, "conv2d", **FORWARD | fields)
    name = library._text(library.lib.fp4bf16_conv2d_config(args, 0))
    if name == "simple":
        pytest.skip("the GPU is no Hopper")
    assert name.startswith(f"fast {best}") and "in turn" not in name
