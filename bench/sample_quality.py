"""Are pictures drawn on the FP4 track as close to real ones as those drawn on BF16, given what seeds do?

    python bench/sample_quality.py RUN [--n 10000] [--floor-seeds 3] [--route FILE ...]
                                   [--device cuda] [--quick] [--json FILE]

The model of a run draws `--n` pictures on BF16, the same captions from the same seeds on the FP4 track, and
`--floor-seeds` further sets on BF16 from other seeds. On every extractor that is installed, and against all
real pictures and those of the winning style:

    change   kernel distance of the FP4 set less that of the BF16 set, with its 95 % interval
    floor    the largest difference of the distances of two BF16 sets: what other seeds alone change

Each ``--route`` adds a set drawn on the FP4 track by the routes of a file (bench/routes has some: for the
noisiest levels alone, and none of the way up), with the share of the FLOPs that it puts on FP4.

Claimed is |change| <= floor, of the set drawn on the run's own routes. Those of files are reported beside it,
each with a verdict of its own, and decide nothing. There are also the distances themselves, the mean
difference of two BF16 sets, and the distances of all sets from each other. None of these numbers is an FID.

Writes bench/results/<machine>/sample_quality.json; exit status 1 where FP4 on the run's own routes changes
more than the floor, and where there is no floor to compare with.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp4bf16.backends import cuda  # noqa: E402
from fp4bf16.cli.bench import record  # noqa: E402
from fp4bf16.errors import CheckpointError, ConfigError, CudaError, LibraryError  # noqa: E402
from fp4bf16.train.engine import make_sampler  # noqa: E402
from fp4bf16.train.evaluation import Settings, compare_sets, draw_all  # noqa: E402
from fp4bf16.train.evaluation_sets import (  # noqa: E402
    Drawn,
    Plan,
    Real,
    Weights,
    cases,
    draw_set,
    fp4_share,
    load_weights,
    real_pictures,
)
from fp4bf16.train.extractors import NOT_FID, make_extractors  # noqa: E402
from fp4bf16.train.progress import Progress  # noqa: E402
from fp4bf16.train.state import peak_rss_mb  # noqa: E402

QUICK = 48  # pictures a set
LINE = (
    "{:20s} {:18s} to {:9s} | bf16 {:8.4g} | fp4 {:8.4g} | change {:+9.3g} [{:+.3g}, {:+.3g}] | "
    "floor {:8.3g} | {}"
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--n", type=int, default=10_000, help="pictures a set (default: 10000)")
    parser.add_argument("--steps", type=int, help="sampling steps (default: as the run's evaluation)")
    parser.add_argument("--seed", type=int, help="of the pictures (default: the run's)")
    parser.add_argument("--floor-seeds", type=int, default=3, help="further BF16 sets (default: 3)")
    parser.add_argument(
        "--route", nargs="*", default=[], metavar="FILE", help="further routes, which do not decide"
    )
    parser.add_argument("--extractors", help="of pixels, classes, efficientnet, with commas (default: all)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} pictures a set: a test of the script")
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--commit", help="of the sources, where there is no git")
    return parser.parse_args(arguments)


def by_route(
    weights: Weights, settings: Settings, files: Sequence[str], real: Real, plan: Plan
) -> tuple[list[Drawn], dict[str, dict[str, Any]]]:
    """All sets that are drawn; name of an FP4 set -> file of its routes (None: the run's), share of FLOPs,
    the routes.
    """
    drawn = draw_all(weights, settings, real, plan, base=False)
    captions, seeds = cases(weights, real.captions, settings.n, settings.seed)
    which, on_gpu = drawn[0].weights, settings.device == "cuda"
    model = weights.model(which, merged=on_gpu)

    def known(file: str | None, weights: Weights, model: Any) -> dict[str, Any]:
        routes = weights.fp4_routes().to_dict()
        return {"file": file, "share": fp4_share(model, settings.steps), "routes": routes}

    about = {drawn[1].name: known(None, weights, model)}
    for file in files:
        there = weights.on(file)
        model = there.model(which, merged=on_gpu)
        name = f"{drawn[1].name}, {Path(file).stem}"
        about[name] = known(Path(file).name, there, model)
        draw = make_sampler(settings.device, model)
        drawn.append(draw_set(draw, (name, which, "fp4", "seeds 1"), captions, seeds, plan))
    return drawn, about


def check_files(weights: Weights, files: Sequence[str], device: str) -> None:
    """`ConfigError` for files whose sets would have one name, and what `Weights` raises; warnings of
    patterns that do nothing. Before anything is drawn.
    """
    weights.check_routes(device)
    known: dict[str, str] = {}
    for file in files:
        stem = Path(file).stem
        if stem in known:
            raise ConfigError(
                f"--route {known[stem]} {file}: both would be reported as {stem!r}; rename one of the files"
            )
        known[stem] = file
        for sentence in weights.on(file).check_routes(device):
            print(f"warning: --route {file}: {sentence}", file=sys.stderr)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Draw the sets and compare them."""
    began, weights = time.perf_counter(), load_weights(args.run)
    wanted = None if args.extractors is None else tuple(args.extractors.split(","))
    settings = Settings(
        QUICK if args.quick else args.n, args.steps, seed=args.seed, device=args.device,
        floor_seeds=args.floor_seeds, extractors=wanted,
    ).checked(weights)  # fmt: skip
    check_files(weights, args.route, args.device)
    real = real_pictures(weights.config)
    extractors, absent = make_extractors(wanted, next(iter(real.references.values())))
    progress = Progress()
    progress.stage("draw", settings.n * (2 + settings.floor_seeds + len(args.route)))
    plan = Plan(weights.config.size, settings.steps, extractors, None, {}, range(1), progress.step)
    drawn, routes = by_route(weights, settings, args.route, real, plan)
    progress.end()
    took = time.perf_counter() - began
    bf16 = [d for d in drawn if d.track == "bf16"]
    rows = []
    for one in (d for d in drawn if d.track == "fp4"):
        some = [bf16[0], one, *bf16[1:]]
        found = [r for e in extractors for r in compare_sets(e, some, real, settings.seed)[3]]
        routes[one.name]["held"] = bool(found) and all(row["within"] for row in found)
        rows += found
    return {
        "run": {"preset": weights.config.preset, "stage": weights.meta["stage"], "step": weights.meta["step"],
                "aligned": weights.aligned, "config": weights.config.to_dict()},
        "settings": asdict(settings),
        "captions": len(set(cases(weights, real.captions, settings.n, settings.seed)[0])),
        "sets": [{"name": d.name, "n": d.n, "unhealthy": d.unhealthy} for d in drawn],
        "references": {name: len(pictures) for name, pictures in real.references.items()},
        "extractors": {e.name: e.about for e in extractors},
        "left_out": absent,
        "routes": routes,
        "rows": rows,
        "held": next(iter(routes.values()))["held"],  # on the run's own routes
        "note": NOT_FID,
        "seconds": {"draw": round(took, 1), "all": round(time.perf_counter() - began, 1)},
        "peak_rss_mb": peak_rss_mb(),
    }  # fmt: skip


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """What it was measured on."""
    about = record.host() | ({"commit": args.commit} if args.commit else {})
    if args.device == "cuda":
        library = cuda.load()
        about |= {"gpu": library.device(0).name, "driver": record.nvidia_smi("driver_version"),
                  "sources": library.source_digest}  # fmt: skip
    return about


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        found = measure(args)
    except (CheckpointError, ConfigError, CudaError, LibraryError, ImportError) as error:
        print(f"sample_quality: {error}", file=sys.stderr)
        return 2
    for name, route in found["routes"].items():
        whose = "decides" if route["file"] is None else f"of {route['file']}, beside it"
        verdict = "holds" if route["held"] else "DOES NOT HOLD"
        print(f"{name}: {100 * route['share']:.1f} % of the FLOPs on FP4, {verdict} ({whose})")
    for row in found["rows"]:
        distance = row["distance"]
        verdict = {True: "within", False: "BEYOND", None: "no floor"}[row["within"]]
        print(LINE.format(row["fp4"].removeprefix("aligned "), row["extractor"], row["reference"],
                          distance[row["bf16"][0]], distance[row["fp4"]],
                          row["change"], row["change_low"], row["change_high"],
                          float("nan") if row["floor"] is None else row["floor"], verdict))  # fmt: skip
    about = machine(args)
    path = args.json or record.default_json("sample_quality", about.get("gpu", "cpu"))
    record.write_json(path, found | {"machine": about})
    print(f"written: {path}")
    return 0 if found["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
