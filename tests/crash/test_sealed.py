"""Turns and conversations with encrypted records, killed at every boundary: the same ends as without."""

from __future__ import annotations

import pytest

from tests.crash import test_every_boundary, test_flow_every_boundary
from tests.crash.places import Stage
from tests.crash.sealed import SEALED
from turnkeeper.engine.tools import Policy

on_a_sealed_file = pytest.mark.parametrize("stage", [SEALED], indirect=True)


@on_a_sealed_file
@pytest.mark.parametrize(("policy", "parallel"), [(Policy.FAIL_CLOSED, True), (Policy.TRANSACTIONAL, False)])
def test_a_turn(stage: Stage, policy: Policy, parallel: bool) -> None:
    """LOG-1, T5, invariants 1 and 2: with appends, and with effects in the store's transaction."""
    test_every_boundary.test_killed_at_every_boundary(stage, policy, parallel=parallel)


@on_a_sealed_file
def test_a_turn_again_and_again(stage: Stage) -> None:
    """T5: also where no process gets far."""
    test_every_boundary.test_killed_again_and_again(stage, Policy.REPLAY_SAFE, 1, parallel=True)


@on_a_sealed_file
def test_a_flow(stage: Stage) -> None:
    """C1 to C9, O1 to O3: a conversation's log."""
    test_flow_every_boundary.test_killed_at_every_boundary(stage, test_flow_every_boundary.COURSES[3])
