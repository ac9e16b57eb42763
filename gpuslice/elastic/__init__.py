"""Trainings that grow and shrink: ranks come and go between two global batches (docs/elastic.md)."""

from .attachment import attach as attach
from .batches import Batch as Batch
from .sampler import ElasticSampler as ElasticSampler
from .world import World as World

__all__ = ["Batch", "ElasticSampler", "World", "attach"]
