"""Routes as files, and the buckets of noise levels that they belong to."""

from __future__ import annotations

import numpy as np
import pytest

from fp4bf16 import ConfigError
from fp4bf16.routing import LayerInfo, Router, RouteSet, bucket_of, check_route, load_routes, save_routes

PINS = {"conv_in*": "bf16", "*": "fp4"}
FREE = [f"blocks.{i}.weight" for i in range(10)]
LAYERS = {name: LayerInfo(100, 1e6) for name in ("conv_in.weight", *FREE)}


# ---- noise levels ----
def test_every_level_is_in_one_bucket_and_they_are_equal(rng):
    for levels, buckets in (
        (1000, 1),
        (1000, 7),
        (10, 10),
        (3, 2),
        *(rng.integers(1, 50, 2) + [50, 0] for _ in "abc"),
    ):
        found = bucket_of(np.arange(levels), int(levels), int(buckets))
        sizes = np.bincount(found, minlength=buckets)
        assert (np.diff(found) >= 0).all() and len(sizes) == buckets and sizes.max() - sizes.min() <= 1
        assert [bucket_of(t, int(levels), int(buckets)) for t in range(levels)] == found.tolist()
    assert bucket_of(np.zeros((0,), np.int64), 10, 2).shape == (0,)
    for bad, text in ((10, "from 10 to 10"), (-1, "from -1"), (1.5, "are float64")):
        with pytest.raises(ValueError, match=text):
            bucket_of(bad, 10, 2)
    for buckets in (0, 11):
        with pytest.raises(ValueError, match=f"buckets is {buckets}"):
            bucket_of(0, 10, buckets)


# ---- files ----
def test_routes_come_back_from_their_file_and_start_another_router(rng, tmp_path):
    router = Router(LAYERS, PINS, buckets=2, budget=0.05)
    low, high = (
        {n: 1e-9 if (i < 5) is first else 1.0 for i, n in enumerate(FREE)} for first in (True, False)
    )
    router.observe(0, omega=[low, high], loss=1.0)
    router.decide(0)
    routes = router.routes_at(1, run="a run")
    path = save_routes(tmp_path / "route.json", routes)
    again = load_routes(path)
    assert (
        again == routes and again.about["run"] == "a run" and again.about["fp4_share"] == router.fp4_share(1)
    )
    assert [p.name for p in tmp_path.iterdir()] == ["route.json"]
    assert again.at(0, 1000) == router.route(1, 0) != router.route(1, 1) == again.at(999, 1000)
    other = Router(LAYERS, PINS, buckets=2, start=again)
    assert all(other.route(0, b) == router.route(1, b) for b in (None, 0, 1))
    four = Router(LAYERS, {"blocks.0*": "bf16", **PINS}, buckets=4, start=RouteSet([{"*": "fp4"}]))
    assert [four.route(0, b)[FREE[1]] for b in range(4)] == ["fp4"] * 4 and four.route(0)[FREE[0]] == "bf16"


def test_a_plain_route_is_a_file_too(tmp_path):
    path = tmp_path / "plain.json"
    path.write_text('{"conv_in*": "bf16", "*": "fp4"}')
    routes = load_routes(path)
    assert routes.of() == routes.of(0) == routes.at(3, 10) == {"conv_in*": "bf16", "*": "fp4"}
    assert load_routes(save_routes(path, {"*": "dual"})).of() == {"*": "dual"}
    with pytest.raises(ValueError, match="bucket is 1"):
        routes.of(1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no JSON"), ("[1]", "is a list, but a dict"),
        ('{"*": "fp5"}', "'fp5' is not a track; did you mean"),
        ('{"*": 4}', "both are strings"), ('{"*": "fp4", "*": "bf16"}', "'*' stands in it twice"),
        ('{"format": "x", "version": 1}', "is 'x' of version 1"),
        ('{"format": "fp4bf16-route", "version": 2, "buckets": [{}]}', "of version 2"),
        ('{"format": "fp4bf16-route", "version": 1}', "buckets is a NoneType"),
        ('{"format": "fp4bf16-route", "version": 1, "buckets": []}', "at least one route"),
        ('{"format": "fp4bf16-route", "version": 1, "buckets": {"*": "fp4"}}', "put one route in a list"),
        ('{"format": "fp4bf16-route", "version": 1, "buckets": [{}, {}]}', "no route for training"),
        ('{"format": "fp4bf16-route", "version": 1, "buckets": [{}], "bucket": 1}', "holds 'bucket'"),
        ('{"format": "fp4bf16-route", "version": 1, "buckets": [{}], "about": 1}', "about that is no object"),
        ('{"format": "fp4bf16-route", "version": 1, "buckets": [{}], "training": []}', "training: is a list"),
        ("[" * 100_000, "no JSON"),
    ],
)  # fmt: skip
def test_files_that_hold_no_route(text, message, tmp_path):
    path = tmp_path / "route.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"route\.json.*") as caught:
        load_routes(path)
    assert message in str(caught.value)


def test_a_route_that_cannot_be_written(tmp_path):
    with pytest.raises(FileNotFoundError, match="make it first"):
        save_routes(tmp_path / "none" / "route.json", {"*": "fp4"})
    with pytest.raises(ConfigError, match="'fp5' is not a track"):
        save_routes(tmp_path / "route.json", {"*": "fp5"})
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="is a str, but a dict"):
        check_route("fp4")
