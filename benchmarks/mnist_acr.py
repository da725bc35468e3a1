"""ACR of smoothed MNIST classifiers beside the released logs of the official SmoothMix code, image by image.

    python benchmarks/mnist_acr.py          seconds on a CPU: samples a second of a fresh LeNet on made-up images
    python benchmarks/training.py mnist   --device cuda --data-dir DATA --out CHECKPOINTS
    python benchmarks/mnist_acr.py CHECKPOINTS --device cuda --data-dir DATA --logs LOGS --out RUNS

CHECKPOINTS holds `mnist_lenet_OBJECTIVE_sigmaNNN.safetensors`; LOGS is `data/certify/mnist` of a clone of
jh-jeong/smoothmix. Each classifier is certified on every 10th test image with 100,000 samples and failure 0.001
(`--whole gaussian_sigma050,smoothmix_sigma050`: on all of them), one resumable run folder each. A JSON line tells
our ACR, that of the logs on the same images (mean of their training runs, and the least and the most), the
difference and its standard error over images. On CUDA the network is bf16 and compiled, once for all.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from equipoise import data, models
from equipoise.certification import Engine, SmoothingPlan, certify
from equipoise.core import records, rng
from equipoise.core.device import precision
from equipoise.data import Dataset, pixels
from equipoise.evaluation.certified import CertificationConditions, CertificationJob, certified

PREFIX, EVERY = "mnist_lenet_", 10
# Where the logs of a recipe lie; runs of other settings, and files that are no per-image logs, are left out.
LOGS = {
    "gaussian": "cohen/noise_{sigma:.2f}_*", "stability": "stab/lbd_2/noise_{sigma}_*",
    "macer": "macer_deferred30/num_16/lbd_*/gamma_8.0/beta_16.0/noise_{sigma:.2f}_*",
    "smoothadv": "salman/pgd_255.0_10_10/num_4/noise_{sigma:.2f}_*",
    "consistency": "consistency/cohen/num_2/lbd_{weight}/eta_0.5/noise_{sigma:.2f}_[1-5]",
    "smoothmix": "smoothmix/smix_1.0_{steps}_m{one}/tau_5.0/num_4/2?/noise_{sigma}",
}
STEPS = {0.25: 2, 0.5: 4, 1.0: 8}
WEIGHTS = {0.25: "10.0", 0.5: "5.0", 1.0: "5.0"}


def sigma_of(name: str) -> float:
    return int(name.split("sigma")[1][:3]) / 100


def logged(folder: Path, name: str) -> NDArray[np.float64]:
    """(runs, 10,000) radii of the released logs, 0 where wrong or abstained."""
    sigma = sigma_of(name)
    pattern = LOGS[name.split("_")[0]].format(sigma=sigma, weight=WEIGHTS[sigma], steps=STEPS[sigma],
                                              one=int(name.endswith("onestep")))
    found = []
    for path in sorted(folder.glob(pattern)):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        assert [int(row["idx"]) for row in rows] == list(range(10_000)), path
        found.append([float(row["radius"]) * int(row["correct"]) for row in rows])
    return np.array(found)


def compare(name: str, rows: list[records.Row], logs: NDArray[np.float64], **facts: object) -> None:
    index = [row["index"] for row in rows]
    ours = np.array([row["radius"] if row["correct"] else 0.0 for row in rows])
    told: dict[str, object] = {"recipe": name, "images": len(ours), "acr": round(float(ours.mean()), 4)}
    if len(logs):
        runs = logs[:, index].mean(axis=1)
        apart = ours - logs[:, index].mean(axis=0)
        told |= {"logs": round(float(runs.mean()), 4), "difference": round(float(apart.mean()), 4),
                 "standard_error": round(float(apart.std() / len(apart) ** 0.5), 4), "runs": len(runs),
                 "least": round(float(runs.min()), 4), "most": round(float(runs.max()), 4)}
    print(json.dumps({**told, **facts}), flush=True)


def warm(model: nn.Module, images: Dataset, terms: CertificationConditions) -> None:
    """Compile and choose kernels, told apart from the certification."""
    begun = time.monotonic()
    x, plan = pixels(images.images[:1].to(terms.device)), replace(terms.plan, samples=1000)
    with precision(terms.precision, terms.device):
        certify(model, x, plan=plan, stream=rng.stream(0, "warm", torch.zeros(1, dtype=torch.int64)),
                engine=Engine(terms.batch_size, terms.compiled))
    print(json.dumps({"warm_up_seconds": round(time.monotonic() - begun, 1)}), flush=True)


def quick(model: nn.Module) -> None:
    index = torch.arange(8)
    x = rng.stream(0, "images", index).integers(256, 1, 28, 28) / 255
    begun = time.monotonic()
    found = certify(model, x, plan=SmoothingPlan(0.5, samples=1000), stream=rng.stream(0, "certify", index))
    rate = int(found.samples.sum()) / (time.monotonic() - begun)
    print(json.dumps({"what": "fresh LeNet", "samples_per_second": round(rate)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path, nargs="?")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/mnist_acr"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, help="noisy images at a time; 32768 on CUDA")
    parser.add_argument("--whole", default="", help="recipes, by commas, to certify on all 10,000 images")
    parser.add_argument("--only", default="", help="recipes, by commas; else every checkpoint")
    parser.add_argument("--every", type=int, default=EVERY)
    args = parser.parse_args()
    fast = args.device == "cuda"
    torch.backends.cudnn.benchmark = fast
    torch.set_float32_matmul_precision("high")
    # One module for all weights: what is compiled for the first serves the others.
    shared = models.build("lenet", num_classes=10, image_shape=(1, 28, 28)).to(args.device).eval()
    if args.checkpoints is None:
        quick(shared)
        return
    if args.data_dir is None or args.logs is None:
        parser.error("CHECKPOINTS needs --data-dir and --logs")
    test = data.load("mnist", split="test", data_dir=args.data_dir)
    some = test.take(torch.arange(0, len(test), args.every))
    wanted = [name for name in args.only.split(",") if name] or [
        path.stem.removeprefix(PREFIX) for path in sorted(args.checkpoints.glob(f"{PREFIX}*.safetensors"))]
    for name in wanted:
        shared.load_state_dict(models.load(str(args.checkpoints / f"{PREFIX}{name}.safetensors")).state_dict())
        whole = name in args.whole.split(",")
        images: Dataset = test if whole else some
        terms = CertificationConditions(SmoothingPlan(sigma_of(name), samples=args.samples), torch.device(args.device), compiled=fast,
                      batch_size=args.batch_size or (32768 if fast else None), precision="bf16" if fast else "fp32")
        if name == wanted[0]:
            warm(shared, some, terms)
        folder = args.out / (f"{name}_whole" if whole else name)
        known = len(records.read(folder))
        begun = time.monotonic()
        results = certified([CertificationJob(name, shared)], images, terms, folder)
        seconds = time.monotonic() - begun
        rows, logs = records.read(folder), logged(args.logs, name)
        clean = next(row["value"] for row in results if row["metric"] == "clean")
        drawn = (len(rows) - known) * (args.samples + terms.plan.n0)
        facts = {"clean": clean, "seconds": round(seconds, 1), "samples_per_second": round(drawn / seconds)}
        if whole:
            compare(name, [row for row in rows if row["index"] % args.every == 0], logs, whole=False)
        compare(name, rows, logs, **facts)


if __name__ == "__main__":
    main()
