"""Diffusion: schedules (DDPM/VP, VE), losses, samplers (DDIM, Euler, Heun, ancestral) with guidance,
averages, and noise drawn per (seed, step).
"""

from .ema import EMA
from .losses import picture_errors, score_weight, squared_error
from .noise import integers, normal, permutation, subseed, uniform
from .samplers import (
    SAMPLERS,
    Step,
    ancestral,
    coefficients,
    ddim,
    euler,
    generate,
    guided,
    heun,
    plan,
)
from .schedules import (
    PREDICTIONS,
    SCHEDULES,
    SPACINGS,
    Schedule,
    check_prediction,
    cosine,
    get_schedule,
    linear,
    variance_preserving,
    ve,
)

__all__ = [
    "EMA",
    "PREDICTIONS",
    "SAMPLERS",
    "SCHEDULES",
    "SPACINGS",
    "Schedule",
    "Step",
    "ancestral",
    "check_prediction",
    "coefficients",
    "cosine",
    "ddim",
    "euler",
    "generate",
    "get_schedule",
    "guided",
    "heun",
    "integers",
    "linear",
    "normal",
    "permutation",
    "picture_errors",
    "plan",
    "score_weight",
    "squared_error",
    "subseed",
    "uniform",
    "variance_preserving",
    "ve",
]
