"""Certification: samples a second against the usual loop, and what stopping early saves.

    python benchmarks/certify.py                                            a minute on a CPU, fresh ResNet-8
    python benchmarks/certify.py --weights W --data D                       the same on real weights and images
    python benchmarks/certify.py --device cuda --weights W --data D         ResNet-18, sigma 0.5, every 20th image

The loop is the reference's way: one image at a time, a thousand noisy copies, counts back on the host after
every batch, single precision. Both run in the same process on the same images. On CUDA ours is bf16, so the
smoothed classifier is that of the bf16 network; compilation is timed apart. Every finding is a JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy.special import betaincinv, ndtri
from torch import Tensor, nn

from equipoise import data, models
from equipoise.certification import Certificate, Engine, SmoothingPlan, certify, joined
from equipoise.certification.sampler import Sampler
from equipoise.core import rng
from equipoise.core.device import precision
from equipoise.core.modes import inference
from equipoise.data import Dataset, pixels


def tell(**facts: object) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in facts.items()}), flush=True)


def waited(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def usual(model: nn.Module, x: Tensor, sigma: float, samples: int, batch: int, chance: torch.Generator) -> np.ndarray:
    """Votes of one image, (K,)."""
    counts = np.zeros(10, dtype=np.int64)
    for start in range(0, samples, batch):
        copies = x.repeat((min(batch, samples - start), 1, 1, 1))
        noise = torch.randn(copies.shape, generator=chance, device=x.device) * sigma
        for label in model(copies + noise).argmax(1).cpu().numpy():
            counts[label] += 1
    return counts


def usual_run(model: nn.Module, x: Tensor, y: Tensor, plan: SmoothingPlan) -> tuple[float, float]:
    """Samples a second and ACR of the usual loop."""
    chance = torch.Generator(x.device).manual_seed(0)
    usual(model, x[:1], plan.sigma, 1000, 1000, chance)
    begun, radii = waited(x.device), []
    for image, label in zip(x.split(1), y.tolist(), strict=True):
        top = usual(model, image, plan.sigma, plan.n0, 1000, chance).argmax()
        k = usual(model, image, plan.sigma, plan.samples, 1000, chance)[top]
        p = betaincinv(k, plan.samples - k + 1, plan.failure) if k else 0.0
        radii.append(max(0.0, plan.sigma * float(ndtri(p))) if top == label and p > 0.5 else 0.0)
    return len(x) * (plan.samples + plan.n0) / (waited(x.device) - begun), float(np.mean(radii))


def ours(
    model: nn.Module, x: Tensor, index: Tensor, plan: SmoothingPlan, engine: Engine, kind: str
) -> tuple[Certificate, float]:
    """Certificates and seconds."""
    begun = waited(x.device)
    with precision(kind, x.device):
        pools = range(0, len(x), 128)
        found = joined([certify(model, x[i : i + 128], plan=plan, engine=engine,
                                stream=rng.stream(0, "certify", index[i : i + 128])) for i in pools])
    return found, waited(x.device) - begun


def acr(found: Certificate, y: Tensor) -> float:
    return float(torch.where(found.predicted == y.cpu(), found.radius, 0.0).mean())


def rate(model: nn.Module, x: Tensor, plan: SmoothingPlan, engine: Engine, kind: str, samples: int) -> float:
    """Samples a second of plain sampling, warm."""
    with torch.no_grad(), inference(model), precision(kind, x.device):
        sampler = Sampler(model, x, rng.stream(0, "rate", torch.arange(len(x))), plan, engine)
        zero = torch.zeros(len(x), dtype=torch.int64)
        sampler.votes("warm", zero, zero + engine.batch_on(x.device) // len(x) + 1)
        begun = waited(x.device)
        sampler.votes("rate", zero, zero + samples // len(x))
        return len(x) * (samples // len(x)) / (waited(x.device) - begun)


def noise_rate(device: torch.device, plan: SmoothingPlan, engine: Engine) -> float:
    """Samples a second where the model costs nothing: the price of the noise."""
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :10]

    x = torch.full((8, 3, 32, 32), 100 / 255, device=device)
    return rate(Nothing(), x, plan, engine, "fp32", 4000 if device.type == "cpu" else 400_000)


def every(images: Dataset, step: int) -> Dataset:
    return images.take(torch.arange(0, len(images), step))


def on_cpu(args: argparse.Namespace) -> None:
    if args.weights:
        model = models.load(f"file:{args.weights}/cifar10_resnet8_standard.safetensors")
        images = every(data.load("cifar10", split="test", data_dir=args.data), 200)
        x, y, index = pixels(images.images)[:8], images.labels[:8], images.index[:8]
    else:
        model = models.build("resnet8", num_classes=10, image_shape=(3, 32, 32))
        x = rng.stream(0, "images", torch.arange(8)).integers(256, 3, 32, 32) / 255
        y, index = torch.zeros(8, dtype=torch.int64), torch.arange(8)
    model.eval()
    plan = SmoothingPlan(0.05, samples=2000, n0=100)
    theirs, _ = usual_run(model, x[:3], y[:3], plan)
    found, seconds = ours(model, x, index, plan, Engine(), "fp32")
    mine = int(found.samples.sum()) / seconds
    tell(what="usual loop", samples_per_second=theirs)
    tell(what="ours, same n", samples_per_second=mine, ratio=mine / theirs)
    early, spent = ours(model, x, index, replace(plan, tolerance=0.02), Engine(), "fp32")
    tell(what="tolerance 0.02", samples=float(early.samples.double().mean()), ratio=seconds / spent,
         acr=acr(early, y), full=acr(found, y))
    for sound in (False, True):
        drawn = noise_rate(x.device, replace(plan, sound=sound), Engine())
        tell(what="sound noise" if sound else "plain noise", samples_per_second=drawn, share=mine / drawn)


def on_cuda(args: argparse.Namespace) -> None:
    device, kind = torch.device("cuda"), "bf16"
    model = models.load(f"file:{args.weights}/cifar10_resnet18_gaussian_sigma050.safetensors").to(device).eval()
    images = every(data.load("cifar10", split="test", data_dir=args.data), args.every)
    x, y, index = pixels(images.images.to(device)), images.labels, images.index
    plan, engine = SmoothingPlan(0.5), Engine(args.batch_size, compiled=True)
    few = 12
    theirs, reached = usual_run(model, x[:few], y[:few], plan)
    tell(what=f"usual loop, {few} images, fp32", samples_per_second=theirs, acr=reached)
    begun = time.perf_counter()
    rate(model, x[:64], plan, engine, kind, 10_000)
    tell(what="compilation", seconds=time.perf_counter() - begun)
    mine = rate(model, x[:64], plan, engine, kind, 1_000_000)
    tell(what="ours", samples_per_second=mine, ratio=mine / theirs)
    eager = rate(model, x[:64], plan, Engine(args.batch_size), kind, 300_000)
    tell(what="ours, not compiled", samples_per_second=eager)
    plans = [replace(plan, tolerance=0.05), replace(plan, tolerance=0.01), replace(plan, decide_radius=0.5), plan]
    results = []
    for each in plans:
        found, seconds = ours(model, x, index, each, engine, kind)
        early = {k: v for k, v in each.facts().items() if k in ("tolerance", "decide_radius")}
        name = early or {"samples": each.samples}
        results.append((name, found, seconds))
        tell(what=str(name), seconds=seconds, acr=acr(found, y), samples=float(found.samples.double().mean()),
             samples_per_second=int(found.samples.sum()) / seconds,
             abstained=float((found.predicted < 0).double().mean()),
             certified_half=float(((found.radius >= 0.5) & (found.predicted == y)).double().mean()))
    _, full, whole = results[-1]
    tell(what=f"ours on the usual loop's {few} images", acr=float(
        torch.where(full.predicted == y, full.radius, 0.0)[:few].mean()), usual=reached)
    tell(what="spread of the ACR over images", standard_error=float(
        torch.where(full.predicted == y, full.radius, 0.0).std() / len(y) ** 0.5))
    for name, found, seconds in results[:-1]:
        tell(what=f"{name} against all samples", times_faster=whole / seconds,
             acr_lost_percent=100 * (1 - acr(found, y) / acr(full, y)),
             samples_saved=float(full.samples.double().mean() / found.samples.double().mean()))
    tell(what="two-sided radius from the same votes", acr=_two_sided(full, y), one_sided=acr(full, y))
    for sound in (False, True):
        drawn = noise_rate(device, replace(plan, sound=sound), engine)
        tell(what="sound noise" if sound else "plain noise", samples_per_second=drawn, share=mine / drawn)


def _two_sided(found: Certificate, y: Tensor) -> float:
    from equipoise.certification.radii import Rule

    _, radius = Rule(0.5, two_sided=True)(found.votes.numpy(), found.counted.double().numpy(), found.chosen.numpy(),
                                          found.failure.numpy())
    return float(np.where((found.chosen == y).numpy(), radius, 0.0).mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--every", type=int, default=20, help="every N-th test image")
    parser.add_argument("--batch-size", type=int, default=4096)
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    (on_cuda if given.device == "cuda" else on_cpu)(given)
