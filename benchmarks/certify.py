"""Certification: samples per second against the usual loop, and the savings of early stopping.

    python benchmarks/certify.py                                            a minute on a CPU,
    untrained ResNet-8 python benchmarks/certify.py --weights W --data D                       the
    same on real weights and images python benchmarks/certify.py --device cuda --weights W --data D
           ResNet-18, sigma 0.5, every 20th image python benchmarks/certify.py --simulated [--kept
           KEPT]                  samples of early stopping, votes simulated

The usual loop is that of the reference code: one image at a time, a thousand noisy copies per
batch, counts copied to the host after every batch, single precision. Both run in the same process
on the same images. On CUDA ours is bf16, so the smoothed classifier is that of the bf16 network;
compilation is timed separately. Every measurement is a JSON line.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import simulated_votes
import torch
from common import add_files, has_files, load_cifar_model, new_parser, print_json, timed
from scipy.special import betaincinv, ndtri
from simulated_votes import EARLY
from torch import Tensor, nn

from equipoise import models
from equipoise.certification import Certificate, Sampler, SamplerOptions, SmoothingPlan, certify
from equipoise.certification.radii import VoteRule
from equipoise.core import rng
from equipoise.core.device import autocast
from equipoise.core.modes import inference
from equipoise.data import load_data, pixels

CHUNK = 128  # images certified together


@dataclass(frozen=True)
class Setup:
    """A model with images, and how its noisy copies are classified."""

    model: nn.Module
    x: Tensor
    y: Tensor
    index: Tensor
    options: SamplerOptions
    precision: str

    @property
    def device(self) -> str:
        return self.x.device.type

    def certify(self, plan: SmoothingPlan) -> tuple[float, Certificate]:
        """Seconds, and the certificates of all images."""

        def run() -> Certificate:
            with autocast(self.precision, self.x.device):
                parts = [
                    certify(
                        self.model,
                        self.x[start : start + CHUNK],
                        plan=plan,
                        options=self.options,
                        stream=rng.stream(0, "certify", self.index[start : start + CHUNK]),
                    )
                    for start in range(0, len(self.x), CHUNK)
                ]
            return Certificate(
                **{
                    field.name: torch.cat([getattr(part, field.name) for part in parts])
                    for field in fields(Certificate)
                }
            )

        return timed(run, self.device)

    def samples_per_second(self, plan: SmoothingPlan, samples: int) -> float:
        """Rate of plain sampling after a warm-up."""
        each = samples // len(self.x)
        zero = torch.zeros(len(self.x), dtype=torch.int64)
        with torch.no_grad(), inference(self.model), autocast(self.precision, self.x.device):
            sampler = Sampler(
                self.model,
                self.x,
                rng.stream(0, "rate", torch.arange(len(self.x))),
                plan,
                self.options,
            )
            sampler.votes(
                "warm", zero, zero + self.options.batch_size_on(self.x.device) // len(self.x) + 1
            )
            seconds, _ = timed(lambda: sampler.votes("rate", zero, zero + each), self.device)
        return len(self.x) * each / seconds

    def acr(self, certificate: Certificate, count: int | None = None) -> float:
        """Average certified radius of the first `count` images."""
        return float(self.radii(certificate)[:count].mean())

    def radii(self, certificate: Certificate) -> Tensor:
        """(B,) radii; 0 where wrong or abstained."""
        return torch.where(certificate.predicted == self.y.cpu(), certificate.radius, 0.0)


@torch.no_grad()
def usual_votes(
    model: nn.Module, x: Tensor, sigma: float, samples: int, generator: torch.Generator
) -> np.ndarray:
    """Votes of one image, (K,), by the usual loop."""
    counts = np.zeros(10, dtype=np.int64)
    for start in range(0, samples, 1000):
        copies = x.repeat((min(1000, samples - start), 1, 1, 1))
        noise = torch.randn(copies.shape, generator=generator, device=x.device) * sigma
        for label in model(copies + noise).argmax(1).cpu().numpy():
            counts[label] += 1
    return counts


def usual_loop(setup: Setup, count: int, plan: SmoothingPlan) -> tuple[float, float]:
    """Samples per second and ACR of the usual loop on the first images."""
    generator = torch.Generator(setup.x.device).manual_seed(0)

    def radius(image: Tensor, label: int) -> float:
        top = usual_votes(setup.model, image, plan.sigma, plan.n0, generator).argmax()
        k = usual_votes(setup.model, image, plan.sigma, plan.samples, generator)[top]
        p = betaincinv(k, plan.samples - k + 1, plan.failure) if k else 0.0
        return max(0.0, plan.sigma * float(ndtri(p))) if top == label and p > 0.5 else 0.0

    usual_votes(setup.model, setup.x[:1], plan.sigma, 1000, generator)  # warm-up
    images, labels = setup.x[:count].split(1), setup.y[:count].tolist()
    seconds, radii = timed(
        lambda: [radius(*pair) for pair in zip(images, labels, strict=True)], setup.device
    )
    return count * (plan.samples + plan.n0) / seconds, float(np.mean(radii))


class FreeModel(nn.Module):
    """A model that costs nothing, to measure the noise alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :10]


def measure_noise(setup: Setup, plan: SmoothingPlan, ours: float) -> None:
    """Samples per second of the noise alone, plain and sound."""
    images = torch.full((8, 3, 32, 32), 100 / 255, device=setup.x.device)
    free = replace(setup, model=FreeModel(), x=images, precision="fp32")
    for sound in (False, True):
        rate = free.samples_per_second(
            replace(plan, sound=sound), 4000 if setup.device == "cpu" else 400_000
        )
        print_json(
            what="sound noise" if sound else "plain noise",
            samples_per_second=rate,
            share=ours / rate,
        )


def on_cpu(args: argparse.Namespace) -> None:
    if has_files(args):
        model = load_cifar_model(args, "resnet8_standard")
        data = load_data("cifar10", data_dir=args.data, every=200)
        x, y, index = pixels(data.images)[:8], data.labels[:8], data.index[:8]
    else:
        model = models.build("resnet8", num_classes=10, image_shape=(3, 32, 32)).eval()
        index, y = torch.arange(8), torch.zeros(8, dtype=torch.int64)
        x = rng.stream(0, "images", index).integers(256, 3, 32, 32) / 255
    setup = Setup(model, x, y, index, SamplerOptions(), "fp32")
    plan = SmoothingPlan(0.05, samples=2000, n0=100)
    start = time.process_time()
    usual, _ = usual_loop(setup, 3, plan)
    usual_each = (time.process_time() - start) / (
        1000 + 3 * (plan.samples + plan.n0)
    )  # with the warm-up
    start = time.process_time()
    seconds, full = setup.certify(plan)
    each = (time.process_time() - start) / int(full.samples.sum())
    ours = int(full.samples.sum()) / seconds
    print_json(what="usual loop", samples_per_second=usual, processor_seconds_per_sample=usual_each)
    # Processor time says more than the clock where other programs use the cores.
    print_json(
        what="ours, same n",
        samples_per_second=ours,
        ratio=ours / usual,
        processor_seconds_per_sample=each,
        processor_ratio=usual_each / each,
    )
    early_seconds, early = setup.certify(replace(plan, tolerance=0.02))
    print_json(
        what="tolerance 0.02",
        samples=float(early.samples.double().mean()),
        ratio=seconds / early_seconds,
        acr=setup.acr(early),
        full=setup.acr(full),
    )
    measure_noise(setup, plan, ours)


def on_cuda(args: argparse.Namespace) -> None:
    data = load_data("cifar10", data_dir=args.data, every=args.every)
    model = load_cifar_model(args, "resnet18_gaussian_sigma050")
    setup = Setup(
        model,
        pixels(data.images.to("cuda")),
        data.labels,
        data.index,
        SamplerOptions(args.batch_size, compiled=True),
        "bf16",
    )
    first = replace(setup, x=setup.x[:64])
    plan, few = SmoothingPlan(0.5), 12
    usual, usual_acr = usual_loop(setup, few, plan)
    print_json(what=f"usual loop, {few} images, fp32", samples_per_second=usual, acr=usual_acr)
    seconds, _ = timed(lambda: first.samples_per_second(plan, 10_000), "cuda")
    print_json(what="compilation", seconds=seconds)
    ours = first.samples_per_second(plan, 1_000_000)
    print_json(what="ours", samples_per_second=ours, ratio=ours / usual)
    eager = replace(first, options=SamplerOptions(args.batch_size)).samples_per_second(
        plan, 300_000
    )
    print_json(what="ours, not compiled", samples_per_second=eager)
    results = {
        name: setup.certify(variant) for name, variant in {"all samples": plan, **EARLY}.items()
    }
    full_seconds, full = results["all samples"]
    full_acr, full_samples = setup.acr(full), float(full.samples.double().mean())
    for name, (seconds, certificate) in results.items():
        samples, acr = float(certificate.samples.double().mean()), setup.acr(certificate)
        # Stopped for one radius, the others were not waited for.
        lost = (
            {} if "decide" in name else {"acr": acr, "acr_lost_percent": 100 * (1 - acr / full_acr)}
        )
        print_json(
            what=name,
            seconds=seconds,
            samples=samples,
            **lost,
            samples_per_second=int(certificate.samples.sum()) / seconds,
            certified_at_half=float((setup.radii(certificate) >= 0.5).double().mean()),
            times_as_fast=full_seconds / seconds,
            samples_saved=full_samples / samples,
        )
    print_json(
        what=f"ours on the {few} images of the usual loop",
        acr=setup.acr(full, few),
        usual=usual_acr,
    )
    print_json(
        what="standard error of the ACR over images",
        standard_error=float(setup.radii(full).std() / len(setup.y) ** 0.5),
    )
    rule = VoteRule(replace(plan, two_sided=True))
    two_sided = rule.radius(
        rule.bounds(
            full.votes.numpy(), full.n.double().numpy(), full.top.numpy(), full.failure.numpy()
        )
    )
    print_json(
        what="two-sided radius from the same votes",
        one_sided=full_acr,
        acr=float(np.where((full.top == setup.y).numpy(), two_sided, 0.0).mean()),
    )
    measure_noise(setup, plan, ours)


def main() -> None:
    parser = new_parser(__doc__)
    add_files(parser)
    parser.add_argument(
        "--simulated",
        action="store_true",
        help="only the samples of early stopping, without a model",
    )
    parser.add_argument("--kept", type=Path, help="kept certificates whose votes are simulated")
    parser.add_argument(
        "--every", type=int, default=20, help="certify every N-th test image (CUDA)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=4096, help="noisy images per forward pass (CUDA)"
    )
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if args.simulated:
        simulated_votes.measure(args.kept)
    elif args.device == "cpu":
        on_cpu(args)
    elif has_files(args):
        on_cuda(args)
    else:
        parser.error("--device cuda needs --weights and --data")


if __name__ == "__main__":
    main()
