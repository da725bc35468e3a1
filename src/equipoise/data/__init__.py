"""Images with labels and their positions in a split: where they come from and how they are
batched."""

from equipoise.data.conversion import as_dataset
from equipoise.data.dataset import Batch, Dataset, batches, pixels
from equipoise.data.sampling import class_share_notes, warn_of_class_shares
from equipoise.data.sources import DATASETS, DataSettings, load_data
from equipoise.data.verification import VerifiedFiles, verify

__all__ = [
    "DATASETS",
    "Batch",
    "DataSettings",
    "Dataset",
    "VerifiedFiles",
    "as_dataset",
    "batches",
    "class_share_notes",
    "load_data",
    "pixels",
    "verify",
    "warn_of_class_shares",
]
