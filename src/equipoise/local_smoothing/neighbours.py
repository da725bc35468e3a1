"""The nearest training images as an oracle: slow to fool, because nothing was learnt that could be."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.core import checks, device
from equipoise.local_smoothing.jacobian import Norm, dual

WEIGHTS = ("plain", "distance")
SPARE = 16  # candidates beyond K whose distance is computed exactly
BYTES = 2**28  # of one block of products


class Neighbours(nn.Module):
    """h_i(x) = 2·(share of the K nearest training images that are of class i) − 1 [Bai2022, Section 3].

    Images are standardised per channel by the mean and deviation of the training images; distances are ℓ2. With
    `distance`, neighbour k counts 1/d_k of the sum of these (an image that was met before decides alone).
    Votes of K neighbours can tie; then h_i = h_j, and whatever is mixed with it decides (g, in Eq. (2)); on its
    own the smaller class is answered. Neighbours at equal distance are taken in the order of the training set.

    Exact: products propose K + 16 candidates per image, direct differences rank them, and where the products'
    rounding could have hidden a nearer one, all distances are computed directly. Differentiable through the
    distances where they count, and constant otherwise.

    Args:
        images: (N, C, H, W) uint8, or floating point in [0, 1].
        labels: (N,).
        num_classes: of all.
        k: neighbours that vote.
        weights: plain or distance.
    """

    points: Tensor
    squares: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, images: Tensor, labels: Tensor, num_classes: int, *, k: int = 5, weights: str = "plain") -> None:
        super().__init__()
        if images.dtype == torch.uint8:
            checks.require(images.dim() == 4, "images", "have shape (N, C, H, W)", tuple(images.shape))
        else:
            checks.images(images)
        checks.whole("num_classes", num_classes, least=2)
        checks.labels(labels, num_classes, len(images))
        checks.whole("k", k, least=1)
        checks.require(k <= len(images), "k", f"be at most the number of images, {len(images)}", k)
        self.k, self.num_classes = k, num_classes
        self.weights = checks.one_of("weights", weights, WEIGHTS)
        dtype = torch.float32 if images.dtype == torch.uint8 else images.dtype
        mean, std = _moments(images)
        self.register_buffer("mean", mean.view(1, -1, 1, 1).to(dtype))
        self.register_buffer("std", std.view(1, -1, 1, 1).to(dtype))
        self.image_shape = tuple(images.shape[1:])
        points = torch.empty(len(images), images[0].numel(), dtype=dtype, device=images.device)
        for rows in torch.arange(len(images)).split(4096):
            x = images[rows].to(dtype) / (255 if images.dtype == torch.uint8 else 1)
            points[rows] = ((x - self.mean) / self.std).flatten(1)
        self.register_buffer("points", points)
        self.register_buffer("squares", points.square().sum(dim=1))
        self.register_buffer("labels", labels.to(torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] → (B, K) in [−1, 1]."""
        return 2 * self.shares(x) - 1

    def shares(self, x: Tensor) -> Tensor:
        """(B, K) what each class has of the vote; sums to one."""
        rows, distances = self.nearest(x)
        if self.weights == "plain":
            count = torch.full_like(distances, 1 / self.k)
        else:
            met = distances == 0
            inverse = torch.where(met, 0.0, 1 / torch.where(met, 1.0, distances))
            inverse = torch.where(met.any(dim=1, keepdim=True), met.to(inverse.dtype), inverse)
            count = inverse / inverse.sum(dim=1, keepdim=True)
        votes = torch.zeros(len(x), self.num_classes, dtype=count.dtype, device=x.device)
        return votes.scatter_add(1, self.labels[rows], count).to(x.dtype)

    def steady(self, x: Tensor, norm: Norm = "linf") -> Tensor:
        """(B,) how far x may move, in this norm, while the K nearest stay the same images, and plain votes constant.

        A step of length s changes no distance by more than s, so the (K+1)-th cannot pass the K-th before half the
        gap between them; the ball of the norm lies in an ℓ2 ball √D^(1 − 2/p) times as wide where p > 2, and is
        stretched by 1/std at most. What Theorem 1 asks of an oracle holds within; a little is taken off for rounding.
        """
        if self.k == len(self.points):
            return torch.full((len(x),), torch.inf, dtype=x.dtype, device=x.device)
        distances = self.nearest(x, self.k + 1)[1].detach()
        gap = distances[:, -1] - distances[:, -2] - 1e-5 * distances[:, -1]
        wider = self.points.shape[1] ** max(0.0, 1 / dual(norm) - 0.5)  # 1/2 − 1/p
        found: Tensor = gap.clamp_min(0) / 2 * float(self.std.min()) / wider
        return found

    def nearest(self, x: Tensor, k: int | None = None) -> tuple[Tensor, Tensor]:
        """(B, k) positions of the nearest training images and their ℓ2 distances, in order; K of them if not said."""
        k = self.k if k is None else k
        # One channel would broadcast to C without a word.
        checks.require(tuple(x.shape[1:]) == self.image_shape, "images", f"have the shape (B, {self.image_shape[0]}, "
                       f"{self.image_shape[1]}, {self.image_shape[2]}) of the neighbours", tuple(x.shape))
        query = ((x.to(self.mean.dtype) - self.mean) / self.std).flatten(1)
        parts = [self._nearest(part, k) for part in query.split(self._grain(k))]
        return torch.cat([rows for rows, _ in parts]), torch.cat([distances for _, distances in parts])

    def _grain(self, k: int) -> int:
        """Queries at a time, so that their candidates fit."""
        return max(1, BYTES // (4 * self.points.shape[1] * (k + SPARE)))

    def _nearest(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        # Products in fewer bits, of TF32 or of casts on the fly, would propose the wrong candidates.
        with torch.no_grad(), device.exactly(query.device):
            # In the order of the training set, which a stable sort then keeps among equals.
            rows, sure = self._candidates(query, k)
            rows = rows.sort(dim=1).values
            if not bool(sure.all()):
                rows = rows.clone()
                for number in (~sure).nonzero().squeeze(1).tolist():
                    apart = (self.points - query[number]).norm(dim=1)
                    rows[number] = apart.sort(stable=True).indices[: rows.shape[1]].sort().values
        apart = torch.linalg.vector_norm(self.points[rows] - query.unsqueeze(1), dim=2)
        order = apart.detach().sort(dim=1, stable=True).indices[:, :k]
        return rows.gather(1, order), apart.gather(1, order)

    def _candidates(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(B, m) rows that hold the k nearest, and (B,) whether rounding leaves no doubt of it."""
        count = len(self.points)
        m = min(k + SPARE, count)
        best, rows = query.new_empty(len(query), 0), self.labels.new_empty(len(query), 0)
        size = max(m, BYTES // (4 * max(len(query), 1)))
        for start in range(0, count, size):
            block = slice(start, min(start + size, count))
            # ‖x − t‖² − ‖x‖²: what all training images share is left out.
            apart = torch.addmm(self.squares[block], query, self.points[block].T, alpha=-2)
            found = apart.topk(min(m, apart.shape[1]), dim=1, largest=False)
            best, at = torch.cat((best, found.values), dim=1).topk(min(m, best.shape[1] + found.values.shape[1]), dim=1,
                                                                   largest=False)
            rows = torch.cat((rows, found.indices + start), dim=1).gather(1, at)
        if m == count:
            return rows, torch.ones(len(query), dtype=torch.bool, device=query.device)
        own = query.square().sum(dim=1)
        # Rounding of a product of d terms grows like √d; ten times that.
        slack = 10 * torch.finfo(query.dtype).eps * (query.shape[1] ** 0.5) * (own + self.squares.max())
        return rows, best[:, k - 1] + slack < best[:, -1]

    def tied(self, x: Tensor) -> Tensor:
        """(B,) whether two classes share the first place."""
        first = self.shares(x).topk(2, dim=1).values
        return first[:, 0] == first[:, 1]


def _moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of every channel; a constant channel says nothing and is left as it is."""
    found = []
    for channel in images.unbind(dim=1):
        if images.dtype == torch.uint8:
            # 50 million bytes have 256 values: counted, so that the sums are exact.
            levels = torch.arange(256, dtype=torch.float64, device=images.device) / 255
            share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
            mean = (share * levels).sum()
            std = (share * (levels - mean).square()).sum().sqrt()
        else:
            std, mean = torch.std_mean(channel.double(), unbiased=False)
        found.append((mean, torch.where(std > 0, std, torch.ones_like(std))))
    return torch.stack([mean for mean, _ in found]), torch.stack([std for _, std in found])
