"""ACR of smoothed MNIST classifiers beside the released logs of the official SmoothMix code, image
by image.

    python benchmarks/mnist_acr.py          seconds on a CPU: samples per second of an untrained
    LeNet on random images python benchmarks/training.py mnist   --device cuda --data-dir DATA --out
    CHECKPOINTS python benchmarks/mnist_acr.py CHECKPOINTS --device cuda --data-dir DATA --logs LOGS
    --out RUNS python benchmarks/mnist_acr.py --study RUN --logs LOGS       compares `equipoise
    reproduce smoothmix --size full` python benchmarks/mnist_acr.py --study KEPT --logs LOGS
    the same from the rows kept by smoothmix_rows.py python benchmarks/mnist_acr.py --logs LOGS
                 the logs alone: ACR by recipe, and its spread

CHECKPOINTS holds `mnist_lenet_OBJECTIVE_sigmaNNN.safetensors`; LOGS is `data/certify/mnist` of a
clone of jh-jeong/smoothmix. Each classifier is certified on every 10th test image with 100,000
samples and failure 0.001 (`--whole gaussian_sigma050,smoothmix_sigma050`: on all of them), in a
resumable run folder of its own. A JSON line holds our ACR, that of the logs on the same images
(mean, least, most and standard deviation of their training runs), the difference (with our radii
rounded as in the logs), its standard error over images, and its distance from the logs in standard
deviations of a training run. The network is compiled once for all; fp32 unless `--precision bf16`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from common import new_parser, print_json, timed
from numpy.typing import NDArray
from smoothmix_rows import CERTIFICATES, as_logged, read_kept, read_log
from torch import nn

from equipoise import models
from equipoise.certification import SamplerOptions, SmoothingPlan, certify
from equipoise.core import records, rng
from equipoise.core.device import autocast
from equipoise.core.rows import CertificateRow, Row
from equipoise.data import load_data
from equipoise.evaluation import certify as certify_dataset

PREFIX = "mnist_lenet_"
CONFIGS = Path(__file__).parents[1] / "configs"
# Paths of the logs of each objective; runs with other settings, and other files, do not match.
LOGS = {
    "gaussian": "cohen/noise_{sigma:.2f}_*",
    "stability": "stab/lbd_2/noise_{sigma}_*",
    "macer": "macer_deferred30/num_16/lbd_*/gamma_8.0/beta_16.0/noise_{sigma:.2f}_*",
    "smoothadv": "salman/pgd_255.0_10_10/num_4/noise_{sigma:.2f}_*",
    "consistency": "consistency/cohen/num_2/lbd_{weight}/eta_0.5/noise_{sigma:.2f}_[1-5]",
    "consistency_smoothadv": "consistency/salman_255.0_10_10/num_4/lbd_1.0/eta_0.5/noise_{sigma:.2f}_[1-5]",
    "smoothmix": "smoothmix/smix_1.0_{steps}_m{one_step}/tau_{eta}/num_4/2?/noise_{sigma}",
}
STEPS = {
    ("5.0", 0.25): 2,
    ("1.0", 0.25): 3,
    ("5.0", 0.5): 4,
    ("1.0", 0.5): 4,
    ("5.0", 1.0): 8,
    ("1.0", 1.0): 8,
}
WEIGHTS = {0.25: "10.0", 0.5: "5.0", 1.0: "5.0"}


def sigma_of(recipe: str) -> float:
    return int(recipe.split("sigma")[1][:3]) / 100


def read_logs(folder: Path, recipe: str) -> NDArray[np.float64]:
    """(runs, 10,000) radii of the released logs; 0 where wrong or abstained."""
    sigma, words = sigma_of(recipe), recipe.split("_")
    eta = "1.0" if "eta1" in words else "5.0"
    name = "consistency_smoothadv" if words[-1] == "smoothadv" else words[0]
    pattern = LOGS[name].format(
        sigma=sigma,
        weight=WEIGHTS[sigma],
        steps=STEPS[eta, sigma],
        eta=eta,
        one_step=int(recipe.endswith("onestep")),
    )
    return np.array([read_log(path) for path in sorted(folder.glob(pattern))])


def radii_of(rows: Sequence[Row]) -> dict[int, float]:
    """Radii by index of the image; 0 where wrong or abstained."""
    return {
        row.index: row.radius if row.correct else 0.0
        for row in rows
        if isinstance(row, CertificateRow)
    }


def compare(
    recipe: str, radii: Mapping[int, float], logs: NDArray[np.float64], **values: object
) -> None:
    """Print our ACR beside that of the logs on the same images; the difference is of radii with
    equal digits."""
    index, ours = list(radii), np.array(list(radii.values()))
    values = {
        "recipe": recipe,
        "images": len(ours),
        "acr": float(ours.mean()),
        "acr_as_logged": float(as_logged(ours).mean()),
        **values,
    }
    if len(logs):
        runs = logs[:, index].mean(axis=1)
        difference = as_logged(ours) - logs[:, index].mean(axis=0)
        spread = float(runs.std(ddof=1)) if len(runs) > 1 else float("nan")
        values |= {
            "logs": float(runs.mean()),
            "difference": float(difference.mean()),
            "standard_error": float(difference.std() / len(difference) ** 0.5),
            "runs": len(runs),
            "least": float(runs.min()),
            "most": float(runs.max()),
            "spread": spread,
            "in_spreads": float(difference.mean()) / (spread * (1 + 1 / len(runs)) ** 0.5),
        }
    print_json(**values)


def describe_logs(logs: Path) -> None:
    """Print the ACR of every recipe in the logs on all images and on every 10th: mean and spread of
    training runs."""
    for recipe in (
        path.stem.removeprefix(PREFIX) for path in sorted(CONFIGS.glob(f"{PREFIX}*.toml"))
    ):
        runs = read_logs(logs, recipe)
        every_10th = runs[:, ::10].mean(axis=1)
        print_json(
            recipe=recipe,
            runs=len(runs),
            acr=float(runs.mean()),
            spread=float(runs.mean(axis=1).std(ddof=1)),
            certified_at_0=float((runs > 0).mean()),
            acr_every_10th=float(every_10th.mean()),
            spread_every_10th=float(every_10th.std(ddof=1)),
        )


def compare_study(study: Path, logs: Path, only: Sequence[str]) -> None:
    """Print every MNIST classifier of a study, or of its kept rows, beside the logs; variants have
    none there."""
    certified = (
        read_kept(study)
        if (study / CERTIFICATES).exists()
        else {
            folder.name: radii_of(records.read_rows(folder))
            for folder in sorted((study / "certificates").iterdir())
        }
    )
    for name, radii in certified.items():
        recipe, _, seed = name.removeprefix(PREFIX).partition("_seed")
        if not name.startswith(PREFIX) or (only and recipe not in only):
            continue
        last = recipe.split("_")[-1]
        if radii and last in (
            f"sigma{round(100 * sigma_of(recipe)):03d}",
            "onestep",
            "eta1",
            "smoothadv",
        ):
            compare(recipe, radii, read_logs(logs, recipe), **({"seed": int(seed)} if seed else {}))


def certify_random_images(
    model: nn.Module,
    count: int,
    samples: int,
    options: SamplerOptions,
    device: str,
    precision: str = "fp32",
) -> float:
    """Seconds; also used to compile the model before it is timed."""
    index = torch.arange(count)
    x = (rng.stream(0, "images", index).integers(256, 1, 28, 28) / 255).to(device)
    plan = SmoothingPlan(0.5, samples=samples)
    with autocast(precision, x.device):
        return timed(
            lambda: certify(
                model, x, plan=plan, stream=rng.stream(0, "certify", index), options=options
            ),
            device,
        )[0]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("checkpoints", type=Path, nargs="?")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/mnist_acr"))
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument(
        "--batch-size", type=int, help="noisy images per forward pass; 32768 on CUDA"
    )
    parser.add_argument(
        "--whole", default="", help="recipes, separated by commas, to certify on all 10,000 images"
    )
    parser.add_argument(
        "--study", type=Path, help="run folder of a study, or its kept rows, instead of CHECKPOINTS"
    )
    parser.add_argument("--precision", default="fp32", help="fp32 or bf16, of certification")
    parser.add_argument(
        "--only", default="", help="recipes, separated by commas; every checkpoint if not given"
    )
    parser.add_argument("--every", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    only = [name for name in args.only.split(",") if name]
    if args.study is not None:
        compare_study(args.study, args.logs, only)
        return
    if args.checkpoints is None and args.logs is not None:
        describe_logs(args.logs)
        return
    cuda = args.device == "cuda"
    torch.backends.cudnn.benchmark = cuda
    torch.set_float32_matmul_precision("high")
    # One module for all weights, so that it is compiled once.
    model = models.build("lenet", num_classes=10, image_shape=(1, 28, 28)).to(args.device).eval()
    if args.checkpoints is None:
        seconds = certify_random_images(model, 8, 1000, SamplerOptions(), args.device)
        print_json(what="untrained LeNet", samples_per_second=round(8 * 1100 / seconds))
        return
    if args.data_dir is None or args.logs is None:
        parser.error("CHECKPOINTS needs --data-dir and --logs")
    batch_size = args.batch_size or (32768 if cuda else None)
    seconds = certify_random_images(
        model, 1, 1000, SamplerOptions(batch_size, compiled=cuda), args.device, args.precision
    )
    print_json(what="warm-up, timed separately", seconds=seconds)
    recipes = only or [
        path.stem.removeprefix(PREFIX)
        for path in sorted(args.checkpoints.glob(f"{PREFIX}*.safetensors"))
    ]
    for recipe in recipes:
        model.load_state_dict(
            models.load(f"file:{args.checkpoints}/{PREFIX}{recipe}.safetensors").state_dict()
        )
        whole = recipe in args.whole.split(",")
        data = load_data("mnist", data_dir=args.data_dir, every=1 if whole else args.every)
        folder = args.out / (f"{recipe}_whole" if whole else recipe)
        resumed = len(records.read_rows(folder))
        seconds, result = timed(
            lambda data=data, folder=folder, recipe=recipe: certify_dataset(  # type: ignore[misc]
                {recipe: model},
                data,
                sigma=sigma_of(recipe),
                samples=args.samples,
                out=folder,
                device=args.device,
                batch_size=batch_size,
                precision=args.precision,
            ),
            args.device,
        )
        rows = [row for row in result.rows if isinstance(row, CertificateRow)]
        logs, drawn = read_logs(args.logs, recipe), sum(row.samples for row in rows[resumed:])
        if whole:
            compare(
                recipe,
                radii_of([row for row in rows if row.index % args.every == 0]),
                logs,
                whole=False,
            )
        compare(
            recipe,
            radii_of(rows),
            logs,
            clean=result.result(recipe, "clean").value,
            seconds=seconds,
            samples_per_second=round(drawn / seconds),
        )


if __name__ == "__main__":
    main()
