"""Turns and conversations with encrypted records, killed at every boundary: the same ends as without."""

from __future__ import annotations

import pytest

from tests.crash import test_every_boundary, test_flow_every_boundary
from tests.crash.places import STORES, TRANSACTIONAL, Stage
from tests.crash.sealed import SEALED
from turnkeeper.engine.tools import Policy

EVERY_TIME = "sqlite file"
"""The others are in `make soak`: what is encrypted lies above the store."""


def on_sealed(*stores: str) -> pytest.MarkDecorator:
    """Run the test on these stores, encrypted."""
    marks = {name: [] if name == EVERY_TIME else [pytest.mark.soak] for name in stores}
    params = [pytest.param(name + SEALED, marks=marks[name]) for name in stores]
    return pytest.mark.parametrize("stage", params, indirect=True)


@on_sealed(*STORES)
def test_a_turn(stage: Stage) -> None:
    """LOG-1, T5, invariants 1 and 2."""
    test_every_boundary.test_killed_at_every_boundary(stage, Policy.FAIL_CLOSED, parallel=True)


@on_sealed(*TRANSACTIONAL)
def test_effects_within_the_transaction(stage: Stage) -> None:
    """LOG-1: what is encrypted, in the same transaction as what is not."""
    test_every_boundary.test_killed_at_every_boundary(stage, Policy.TRANSACTIONAL, parallel=False)


@on_sealed(*STORES)
def test_a_turn_again_and_again(stage: Stage) -> None:
    """T5: also where no process gets far."""
    test_every_boundary.test_killed_again_and_again(stage, Policy.REPLAY_SAFE, 1, parallel=True)


@on_sealed(*STORES)
def test_a_flow(stage: Stage) -> None:
    """C1 to C9, O1 to O3: a conversation's log."""
    test_flow_every_boundary.test_killed_at_every_boundary(stage, test_flow_every_boundary.COURSES[3])
