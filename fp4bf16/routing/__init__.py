"""Routing: which layer runs on which track, and why; and the loop that moves it while a network is trained.

    layers = layers_of(unet, (32, 16, 16, 12))
    router = Router(layers, pins={"conv_in*": "bf16", "*": "fp4"}, budget=0.02)
    router.observe(step, omega={name: rise of the loss}, loss=loss, latency=modelled(unet, shape))
    router.decide(step)                              # routes from the next step on
    unet.apply_route(router.route(step + 1))         # training; bucket=i: sampling at those noise levels
    print(router.explain())

- Sensitivity: `layer_traces` (`hutchinson`, `hutch_plus_plus` over `hvp`) with `curvature_omega`,
  `fisher_omega`, `ActivationProbe`, `GradientVariance`, `Demotion`.
- Cost: `flops`, `work`, `modelled` (a roofline), `measure` (the clock), kept by `fp4bf16.tune.LatencyTable`.
- Choice: `allocate` (a knapsack with hysteresis), `settle` (a decision from plain data), `Router`.
- Files: `RouteSet`, `save_routes`, `load_routes`; `bucket_of` says which noise level is in which bucket.
- The loop: `ClosedLoop`, with `Feedback` from the measured consistency to the budget.
"""

from .allocation import Allocation, Candidate, allocate
from .curvature import Trace, hutch_plus_plus, hutchinson, hvp, layer_traces
from .decision import Decision, settle
from .feedback import Feedback
from .latency import H200, Rates, Stopwatch, Work, flops, measure, modelled, work
from .loop import ClosedLoop
from .pins import DEFAULT_ROUTE, LayerInfo, free_track, layers_of, unmatched
from .router import Router
from .routes import RouteSet, bucket_of, check_route, load_routes, save_routes
from .sensitivity import (
    ActivationProbe,
    Demotion,
    GradientVariance,
    curvature_omega,
    fisher_omega,
    quantisation_error,
    squared_error_scale,
    squared_norms,
)

__all__ = [
    "DEFAULT_ROUTE", "H200", "ActivationProbe", "Allocation", "Candidate", "ClosedLoop", "Decision",
    "Demotion", "Feedback", "GradientVariance", "LayerInfo", "Rates", "RouteSet", "Router", "Stopwatch",
    "Trace", "Work", "allocate",
    "bucket_of", "check_route", "curvature_omega", "fisher_omega", "flops", "free_track", "hutch_plus_plus",
    "hutchinson", "hvp", "layer_traces", "layers_of", "load_routes", "measure", "modelled",
    "quantisation_error", "save_routes", "settle", "squared_error_scale", "squared_norms", "unmatched",
    "work",
]  # fmt: skip
