"""Images with labels and their positions in a split: where they come from and how they are batched."""

from equipoise.data.dataset import Batch, Dataset, as_dataset, batches, pixels
from equipoise.data.sources import DATASETS, DataSettings, load_data

__all__ = ["DATASETS", "Batch", "DataSettings", "Dataset", "as_dataset", "batches", "load_data", "pixels"]
