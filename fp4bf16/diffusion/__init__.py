"""Diffusion: schedules (DDPM), losses, samplers (DDIM, ancestral), averages, and noise drawn per (seed,
step).
"""

from .ema import EMA
from .losses import picture_errors, squared_error
from .noise import integers, normal, permutation, subseed, uniform
from .samplers import SAMPLERS, ancestral, coefficients, ddim, generate
from .schedules import PREDICTIONS, SCHEDULES, Schedule, check_prediction, cosine, get_schedule, linear

__all__ = [
    "EMA",
    "PREDICTIONS",
    "SAMPLERS",
    "SCHEDULES",
    "Schedule",
    "ancestral",
    "check_prediction",
    "coefficients",
    "cosine",
    "ddim",
    "generate",
    "get_schedule",
    "integers",
    "linear",
    "normal",
    "permutation",
    "picture_errors",
    "squared_error",
    "subseed",
    "uniform",
]
