"""Attack what `equipoise evaluate` left of a mixture with code written apart from the package, and
count the successes.

The attack is `tests/attacks/independent_hinges.py`: plain PyTorch, two hinges, nine targets, 100
steps, two restarts. It gets the images of the run that survived every attack on the mixture; only
the class that the mixture predicts, in full precision, counts. Nothing of the run is changed.

    equipoise evaluate mixture:M --count 1000 --device cuda --out RUN
    PYTHONPATH=src python3 benchmarks/independent_attack.py mixture:M RUN --device cuda --data-dir
    DATA

A pair of ResNet-18 and 450 images are 810 thousand gradients of both networks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from common import new_parser, timed

from equipoise.core.checks import InputError
from equipoise.core.format import interval, percent
from equipoise.core.records import read_description, read_rows
from equipoise.core.rows import AttackRow
from equipoise.core.stats import clopper_pearson
from equipoise.core.threat import Threat
from equipoise.data import Dataset, load_data, pixels
from equipoise.mixing import load_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "attacks"))
import independent_hinges


def survivors(run: Path, model: str, data_dir: str | None) -> tuple[Dataset, int, Threat]:
    """The images of a run that every attack on the model left, the number of all its images, and
    the threat."""
    correct: dict[int, bool] = {}
    for row in read_rows(run):
        if isinstance(row, AttackRow) and row.model == model:
            correct[row.index] = correct.get(row.index, True) and row.correct
    if not correct:
        raise InputError(
            f"{run} must have rows of {model!r}; name another model of it with --model"
        )
    identity = read_description(run / "run.toml").identity
    whole = load_data(identity["data"]["name"], identity["data"]["split"], data_dir=data_dir)
    left = {index for index, survived in correct.items() if survived}
    rows = torch.tensor([row for row, index in enumerate(whole.index.tolist()) if index in left])
    return whole.take(rows), len(correct), Threat(**identity["threat"])


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("mixture", help="reference of the mixture, such as mixture:M")
    parser.add_argument("run", type=Path, help="folder of `equipoise evaluate`")
    parser.add_argument("--model", default="mixed", help="name of the mixture in the run")
    parser.add_argument("--data-dir", help="folder with the data; $EQUIPOISE_DATA if not given")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--targets", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--batch-size", type=int, help="pairs of image and target in a pass: 72, or 1024 on CUDA"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data, total, threat = survivors(args.run, args.model, args.data_dir)
    if threat.norm != "linf":
        raise InputError(f"the threat of {args.run} must be linf, got {threat}")
    mixture = (
        load_model(args.mixture)
        .eval()
        .requires_grad_(False)
        .to(args.device, memory_format=torch.channels_last)
    )
    x, y = pixels(data.images).to(args.device), data.labels.to(args.device)
    batch = args.batch_size or (1024 if args.device == "cuda" else 72)
    with torch.no_grad():
        wrong = sum(
            int(independent_hinges.misclassified(mixture, *part).sum())
            for part in zip(x.split(batch), y.split(batch), strict=True)
        )
    if wrong:
        raise InputError(
            f"{args.mixture} must be the mixture of the run, but it misclassifies {wrong} of the "
            f"{len(data)} images that the run calls robust without any attack"
        )
    print(f"{args.run}: the attacks left {len(data)} of {total} images, {threat}", flush=True)
    seconds, broken = timed(
        lambda: independent_hinges.attack(
            mixture,
            x,
            y,
            threat.eps,
            steps=args.steps,
            restarts=args.restarts,
            targets=args.targets,
            seed=args.seed,
            batch=batch,
        ),
        args.device,
    )
    estimate = clopper_pearson(int(broken.sum()), len(data))
    print(
        f"the independent attack (two hinges, {args.targets} targets × {args.steps} steps × {args.restarts} "
        f"restarts) breaks {int(broken.sum())} of {len(data)}, {percent(estimate.value)} "
        f"(95 % interval {interval(estimate.low, estimate.high)}), in {seconds:.1f} s"
    )
    print(f"indices of the broken images: {data.index[broken.cpu()].tolist()}")


if __name__ == "__main__":
    main()
