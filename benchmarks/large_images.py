"""APGD on networks for large images, beside the original AutoAttack's in the same run, then `fast`;
peak memory.

Fresh weights; the labels are the network's own predictions. At the small radius of APGD nothing
breaks, so that both make all passes. Needs timm and a clone of the original AutoAttack:
    PYTHONPATH=src python3 benchmarks/large_images.py --device cuda --reference CLONE
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from common import new_parser, print_json, timed
from torch import nn

from equipoise import models
from equipoise.attacks import Apgd, Attack, AttackState, attack_dataset, fast
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels

NETWORKS = "resnet50,vit_base_patch16_224,convnext_base"
SMALL_EPS, FAST_EPS = 1e-7, 4 / 255


def new_network(name: str, size: int) -> nn.Module:
    """A network of timm with fresh weights, or of the zoo as in zoo:resnet18."""
    torch.manual_seed(0)
    if name.startswith("zoo:"):
        return models.load(name, image_shape=(3, size, size), num_classes=1000)
    import timm

    network: nn.Module = timm.create_model(name, pretrained=False)
    return network


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--networks", default=NETWORKS, help="names of timm or zoo:NAME, separated by commas"
    )
    parser.add_argument(
        "--reference", type=Path, required=True, help="folder that holds the package autoattack"
    )
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sys.path.insert(0, str(args.reference))
    from autoattack.autopgd_base import APGDAttack

    for name in args.networks.split(","):
        model = new_network(name, args.size).eval().requires_grad_(False).to(args.device)
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(
            256, (args.count, 3, args.size, args.size), generator=generator, dtype=torch.uint8
        )
        x = pixels(images).to(args.device)
        with torch.no_grad():
            logits = model(x)
        y = logits.argmax(dim=1)
        classes = tuple(map(str, range(logits.shape[1])))
        data = Dataset("random", "test", images, y.cpu(), torch.arange(args.count), classes)

        def original(
            steps: int, model: nn.Module = model, x: torch.Tensor = x, y: torch.Tensor = y
        ) -> None:
            APGDAttack(
                model, n_iter=steps, norm="Linf", eps=SMALL_EPS, seed=0, device=args.device
            ).perturb(x, y)

        def ours(
            attack: Attack, eps: float, model: nn.Module = model, data: Dataset = data
        ) -> AttackState:
            return attack_dataset(
                attack,
                model,
                data,
                threat=Threat("linf", eps),
                seed=0,
                batch_size=len(data),
                device=args.device,
            )

        original(2)  # loading kernels is not timed
        theirs_s, _ = timed(lambda run=original: run(args.steps), args.device)
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ours(Apgd(steps=2), SMALL_EPS)
        ours_s, state = timed(lambda run=ours: run(Apgd(steps=args.steps), SMALL_EPS), args.device)
        fast_s, _ = timed(lambda run=ours: run(fast(), FAST_EPS), args.device)
        peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else None
        print_json(
            network=name,
            images=args.count,
            original_s=theirs_s,
            ours_s=ours_s,
            speed_up=theirs_s / ours_s,
            survive=int(state.survived.sum()),
            fast_s=fast_s,
            peak_gib=peak,
        )


if __name__ == "__main__":
    main()
