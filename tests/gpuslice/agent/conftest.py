"""What tests of agents share."""

from __future__ import annotations

import pytest

from ..conftest import Workshop
from .rank import Rank
from .scripted_scheduler import scheduler

__all__ = ["scheduler"]


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def workshop(warm_workshop: Workshop) -> Workshop:
    return warm_workshop
