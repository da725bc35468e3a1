"""Images with their labels and their place in the split: where they come from and how they are handed out."""

from equipoise.data.batches import Batch as Batch
from equipoise.data.batches import batches as batches
from equipoise.data.batches import pixels as pixels
from equipoise.data.batches import shuffled as shuffled
from equipoise.data.dataset import Dataset as Dataset
from equipoise.data.sources import load as load
