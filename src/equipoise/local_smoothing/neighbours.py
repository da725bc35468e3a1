"""The nearest training images as an oracle: hard to fool, because it has no weights that were
trained."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.core import checks, device
from equipoise.core.geometry import dual_order
from equipoise.local_smoothing.jacobian import Norm
from equipoise.models.inspection import Described

WEIGHTS = ("plain", "distance")
SPARE = 16  # candidates beyond K whose distance is computed exactly
BLOCK_BYTES = 2**28  # memory of one block of products


class Neighbours(Described):
    """h_i(x) = 2·(share of the K nearest training images that are of class i) − 1 [Bai2022, Section
    3].

    Images are standardised per channel by the mean and standard deviation of the training images;
    distances are ℓ2. With `distance`, neighbour k has weight 1/d_k (a training image itself has all
    the weight). Votes can tie; then h_i = h_j, and the classifier that it is mixed with decides (g,
    in Eq. (2)); alone, the smaller class is predicted. Neighbours at equal distance are taken in
    the order of the training set.

    Exact: products propose K + 16 candidates per image, direct differences rank them, and where the
    rounding of the products could have hidden a nearer one, all distances are computed directly.
    Differentiable through the distances if they are weights, and constant otherwise.

    Args:
        images, labels: (N, C, H, W) uint8, or floating point in [0, 1], and (N,).
        num_classes: of the classifier.
        k: number of neighbours.
        weights: plain or distance.
        block_bytes: memory of one block of products; it does not change the result.
    """

    description = ("neighbours", "k", "weights", "num_classes")
    points: Tensor
    squares: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        num_classes: int,
        *,
        k: int = 5,
        weights: str = "plain",
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        super().__init__()
        if images.dtype == torch.uint8:
            checks.require(
                images.dim() == 4, "images", "have shape (N, C, H, W)", tuple(images.shape)
            )
        else:
            checks.images(images)
        checks.whole("num_classes", num_classes, least=2)
        checks.labels(labels, num_classes, len(images))
        checks.require(
            checks.whole("k", k, least=1) <= len(images),
            "k",
            f"be at most the number of images, {len(images)}",
            k,
        )
        self.k, self.num_classes, self.block_bytes = k, num_classes, block_bytes
        self.weights = checks.one_of("weights", weights, WEIGHTS)
        dtype = torch.float32 if images.dtype == torch.uint8 else images.dtype
        mean, std = _channel_statistics(images)
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
        rows, distances = self.nearest(x)
        if self.weights == "plain":
            weights = torch.full_like(distances, 1 / self.k)
        else:
            equal = distances == 0
            inverse = torch.where(equal, 0.0, 1 / torch.where(equal, 1.0, distances))
            inverse = torch.where(equal.any(dim=1, keepdim=True), equal.to(inverse.dtype), inverse)
            weights = inverse / inverse.sum(dim=1, keepdim=True)
        shares = torch.zeros(len(x), self.num_classes, dtype=weights.dtype, device=x.device)
        return 2 * shares.scatter_add(1, self.labels[rows], weights).to(x.dtype) - 1

    def constant_vote_radius(self, x: Tensor, norm: Norm = "linf") -> Tensor:
        """(B,) a radius in this norm within which the K nearest images stay the same, and plain
        votes constant.

        A step of length s changes no distance by more than s, so the (K+1)-th cannot pass the K-th
        before half the gap between them; the ball of the norm lies in an ℓ2 ball √D^(1 − 2/p) times
        as wide where p > 2, and is stretched by 1/std at most. Within it the condition of Theorem 1
        on the oracle holds; rounding errors are subtracted.
        """
        if self.k == len(self.points):
            return torch.full((len(x),), torch.inf, dtype=x.dtype, device=x.device)
        distances = self.nearest(x, self.k + 1)[1].detach()
        gap = distances[:, -1] - distances[:, -2] - 1e-5 * distances[:, -1]
        stretch = self.points.shape[1] ** max(0.0, 1 / dual_order(norm) - 0.5)  # 1/2 − 1/p
        radius: Tensor = gap.clamp_min(0) / 2 * float(self.std.min()) / stretch
        return radius

    def nearest(self, x: Tensor, k: int | None = None) -> tuple[Tensor, Tensor]:
        """(B, k) positions of the nearest training images and their ℓ2 distances, in order; K of
        them by default."""
        k = self.k if k is None else k
        # One channel would be broadcast to C silently.
        checks.require(
            tuple(x.shape[1:]) == self.image_shape,
            "images",
            f"have the shape (B, {self.image_shape[0]}, "
            f"{self.image_shape[1]}, {self.image_shape[2]}) of the neighbours",
            tuple(x.shape),
        )
        query = ((x.to(self.mean.dtype) - self.mean) / self.std).flatten(1)
        # So that their candidates fit
        chunk = max(1, self.block_bytes // (4 * self.points.shape[1] * (k + SPARE)))
        results = [self._nearest(part, k) for part in query.split(chunk)]
        return torch.cat([rows for rows, _ in results]), torch.cat(
            [distances for _, distances in results]
        )

    def _nearest(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        # Products in TF32 or under autocast would propose the wrong candidates.
        with torch.no_grad(), device.full_precision(query.device):
            # In the order of the training set, which a stable sort then keeps among equals.
            rows, certain = self._candidates(query, k)
            rows = rows.sort(dim=1).values
            for number in (~certain).nonzero().squeeze(1).tolist():
                distances = (self.points - query[number]).norm(dim=1)
                rows[number] = distances.sort(stable=True).indices[: rows.shape[1]].sort().values
        distances = torch.linalg.vector_norm(self.points[rows] - query.unsqueeze(1), dim=2)
        order = distances.detach().sort(dim=1, stable=True).indices[:, :k]
        return rows.gather(1, order), distances.gather(1, order)

    def _candidates(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(B, m) rows that include the k nearest, and (B,) whether that is certain in spite of
        rounding."""
        count = len(self.points)
        m = min(k + SPARE, count)
        best, rows = query.new_empty(len(query), 0), self.labels.new_empty(len(query), 0)
        size = max(m, self.block_bytes // (4 * max(len(query), 1)))
        for start in range(0, count, size):
            block = slice(start, start + size)
            # ‖x − t‖² − ‖x‖²: the term that all training images share is left out.
            scores = torch.addmm(self.squares[block], query, self.points[block].T, alpha=-2)
            lowest = scores.topk(min(m, scores.shape[1]), dim=1, largest=False)
            scores = torch.cat((best, lowest.values), dim=1)
            best, at = scores.topk(min(m, scores.shape[1]), dim=1, largest=False)
            rows = torch.cat((rows, lowest.indices + start), dim=1).gather(1, at)
        if m == count:
            return rows, torch.ones(len(query), dtype=torch.bool, device=query.device)
        own = query.square().sum(dim=1)
        # The rounding error of a product of d terms grows like √d; ten times that.
        slack = (
            10 * torch.finfo(query.dtype).eps * (query.shape[1] ** 0.5) * (own + self.squares.max())
        )
        return rows, best[:, k - 1] + slack < best[:, -1]


def _channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every channel; that of a constant channel is replaced by 1."""
    statistics = []
    for channel in images.unbind(dim=1):
        if images.dtype == torch.uint8:
            # Bytes have 256 values: counted, so that the sums are exact.
            levels = torch.arange(256, dtype=torch.float64, device=images.device) / 255
            share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
            mean = (share * levels).sum()
            std = (share * (levels - mean).square()).sum().sqrt()
        else:
            std, mean = torch.std_mean(channel.double(), unbiased=False)
        statistics.append((mean, torch.where(std > 0, std, torch.ones_like(std))))
    return torch.stack([mean for mean, _ in statistics]), torch.stack(
        [std for _, std in statistics]
    )
