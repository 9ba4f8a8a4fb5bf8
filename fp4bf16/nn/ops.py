"""All recorded operations in one namespace: ``from fp4bf16.nn import ops as F``."""

from .ops_math import (
    add,
    clip,
    div,
    exp,
    full_like,
    log,
    log_sigmoid,
    log_softmax,
    maximum,
    mean,
    mean_squared_error,
    minimum,
    mul,
    neg,
    power,
    sigmoid,
    silu,
    softmax,
    softplus,
    sqrt,
    stop_gradient,
    sub,
    sum,
    tanh,
    where,
)
from .ops_network import (
    attention,
    conv2d,
    group_norm,
    linear,
    matmul,
    take,
    through_quantiser,
)
from .ops_shape import broadcast_to, concat, getitem, pad, reshape, sum_to, transpose, unslice
from .ops_upsample import avg_pool2, upsample_conv, upsample_nearest

__all__ = [
    "add", "attention", "avg_pool2", "broadcast_to", "clip", "concat", "conv2d", "div", "exp",
    "full_like", "getitem", "group_norm", "linear", "log", "log_sigmoid", "log_softmax", "matmul",
    "maximum", "mean", "mean_squared_error", "minimum", "mul", "neg", "pad", "power", "reshape",
    "sigmoid", "silu", "softmax", "softplus", "sqrt", "stop_gradient", "sub", "sum", "sum_to", "take",
    "tanh", "through_quantiser", "transpose", "unslice", "upsample_conv", "upsample_nearest", "where",
]  # fmt: skip
