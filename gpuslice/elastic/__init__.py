"""Trainings that grow and shrink: ranks come and go between two global batches (docs/elastic.md)."""

from .batches import Batch as Batch
from .sampler import ElasticSampler as ElasticSampler
from .world import World as World
from .world import attach as attach

__all__ = ["Batch", "ElasticSampler", "World", "attach"]
