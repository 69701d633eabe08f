"""The demo's supervisor: hands out conversations, kills workers, starts new ones, and settles what only a person could."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from turnkeeper.cli.demo.boundaries import ANY, pick
from turnkeeper.cli.demo.conversations import Conversation, turns
from turnkeeper.cli.demo.ledger import Ledger
from turnkeeper.cli.demo.worker import Orders
from turnkeeper.errors import TurnCheckpointConflict, TurnkeeperError
from turnkeeper.keeper import Keeper

_AT_ONCE: Final = 4
"""Conversations that one worker has in hand at the same time."""
_SCARCE: Final = 5
_SPARE: Final = 30
"""Turns for each kill to be made, and besides, below which turns are taken one by one, and each life has its end."""
_BOUNDARIES_OF_A_TURN: Final = 14
"""How many a worker passes in the shortest of turns: one model call and a reply."""
_LATEST: Final = 40
"""Boundaries after which a life ends in any case while turns are scarce: about where a turn's effects come."""
_PASSES_BY: Final = 2
"""Turns begun without coming to the boundary, after which a worker is killed wherever it is."""
_NEVER_COMES: Final = 3.0
"""Seconds after which a worker that did not come to its boundary is killed wherever it is."""


@dataclass
class Progress:
    """How far the demo is, for the live view."""

    turns: int
    kills_wanted: int
    turns_done: set[str] = field(default_factory=set[str])
    kills: int = 0
    kills_in_a_turn: int = 0
    kills_at: dict[str, int] = field(default_factory=dict[str, int])
    settled_by_operator: int = 0
    workers_started: int = 0


class _Plan(msgspec.Struct, frozen=True):
    """How one life ends.

    Attributes:
        after: turns begun before a kill at a random instant.
        boundary, count: the n-th passing of this boundary, or of any; None: a random instant.
        latest: the number of boundaries passed at which it ends in any case.
    """

    after: int
    boundary: str | None
    count: int
    latest: int | None


class WorkerFailed(TurnkeeperError):
    """A worker ended by itself, which it never should."""


class Supervisor:
    """Runs the demo to its end."""

    def __init__(
        self,
        orders: Orders,
        conversations: list[Conversation],
        *,
        workers: int,
        kills: int,
        seed: int,
        show: Callable[[Progress], None],
    ) -> None:
        self._orders = orders
        self._workers = workers
        self._chance = random.Random(seed)  # noqa: S311  # repeatable on purpose
        self._show = show
        self._waiting = deque(conversation.id for conversation in conversations)
        self._left = len(conversations)
        self._turns = {
            f"{orders.prefix}{turn.id}": turn for conversation in conversations for turn in turns(conversation)
        }
        self.progress = Progress(turns=len(self._turns), kills_wanted=kills)
        self._last_turns = {
            conversation.id: f"{orders.prefix}{turns(conversation)[-1].id}" for conversation in conversations
        }
        self._killing = 0

    async def run(self, keeper: Keeper, ledger: Ledger) -> None:
        """Go on until every conversation is done.

        Raises:
            WorkerFailed: a worker ended by itself; what it wrote is in the message.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._keep_one_running(keeper, ledger))

    async def _keep_one_running(self, keeper: Keeper, ledger: Ledger) -> None:
        while self._left:
            if not self._waiting or self._others_make_the_last_kills():
                # The others have all that is left in hand; or a life without an end would take their turns from them.
                await asyncio.sleep(0.02)
                continue
            await _Life(self, keeper, ledger).run()

    def next_conversation(self) -> str | None:
        """A conversation that nobody has in hand."""
        return self._waiting.popleft() if self._waiting else None

    def gave_up(self, conversation_id: str) -> None:
        """The conversation has to be gone on with by somebody."""
        self._waiting.append(conversation_id)

    def finished(self, conversation_id: str) -> bool:
        """Whether the conversation is at its end; else it is to be gone on with."""
        if self._last_turns[conversation_id] in self.progress.turns_done:
            self._left -= 1
            return True
        self.gave_up(conversation_id)
        return False

    def turn_done(self, turn_id: str) -> None:
        """A turn is closed."""
        self.progress.turns_done.add(turn_id)
        self._show(self.progress)

    def plan_kill(self) -> _Plan | None:
        """Whether and when the next life ends."""
        left = self._kills_left() - self._killing
        if left <= 0:
            return None
        self._killing += 1
        if self._turns_are_scarce():
            # A kill uses up no more than its share of what is left, so that something is left for the last one.
            share = _BOUNDARIES_OF_A_TURN * self._turns_left() // left
            latest = max(2, min(_LATEST, share))
            if self._chance.random() < 0.6:
                return _Plan(1, pick(self._chance), 1, latest)
            return _Plan(1, ANY, self._chance.randint(1, latest), latest)
        after = self._chance.randint(1, max(1, 2 * self._turns_left() // (3 * left)))
        boundary = pick(self._chance) if self._chance.random() < 0.6 else None
        return _Plan(after, boundary, self._chance.randint(1, 2), None)

    def _others_make_the_last_kills(self) -> bool:
        return 0 < self._kills_left() <= self._killing

    def at_once(self) -> int:
        """How many conversations one worker has in hand: few where they would be done before the kills are made."""
        return 1 if self._turns_are_scarce() else _AT_ONCE

    def _turns_are_scarce(self) -> bool:
        return self._turns_left() < _SCARCE * self._kills_left() + _SPARE

    def _kills_left(self) -> int:
        # One that came between two turns proves nothing, so another is made for it.
        return self.progress.kills_wanted - self.progress.kills_in_a_turn

    def _turns_left(self) -> int:
        return self.progress.turns - len(self.progress.turns_done)

    def killed(self, at: str, *, in_a_turn: bool) -> None:
        """A kill was made."""
        progress = self.progress
        self._killing -= 1
        progress.kills += 1
        progress.kills_in_a_turn += in_a_turn
        progress.kills_at[at] = progress.kills_at.get(at, 0) + 1
        self._show(progress)

    def spared(self) -> None:
        """A planned kill was not made: the work was done before."""
        self._killing -= 1

    def command(self, plan: _Plan | None) -> list[str]:
        """How a worker is started."""
        orders = self._orders
        if plan is not None:
            orders = msgspec.structs.replace(
                orders, stop_at=plan.boundary, stop_count=plan.count, stop_latest=plan.latest
            )
        return [sys.executable, "-m", "turnkeeper.cli.demo.worker", msgspec.json.encode(orders).decode()]

    def random_delay(self) -> float:
        """How long after a turn's beginning a kill anywhere comes: about as long as a turn takes."""
        return self._chance.uniform(0.0, 0.03)

    async def settle(self, turn_id: str, open_slots: list[tuple[int, int]], keeper: Keeper, ledger: Ledger) -> None:
        """Be the operator: look into the ledger what really happened, and settle the call with that as evidence."""
        turn = self._turns[turn_id]
        for round_index, slot_index in open_slots:
            call = await keeper.session(turn_id).get_tool(round_index, slot_index)
            assert call is not None
            operation = call.operation_id
            rows = ledger.effects(operation)
            try:
                if rows:
                    await keeper.resolve_tool(
                        turn_id,
                        round_index,
                        slot_index,
                        "happened",
                        who="demo operator",
                        why=f"the ledger has it in row {rows[0].id}",
                        fence=call.fence,
                        result=turn.results[round_index, slot_index],
                    )
                else:
                    await keeper.resolve_tool(
                        turn_id,
                        round_index,
                        slot_index,
                        "did_not_happen",
                        who="demo operator",
                        why="not in the ledger",
                        fence=call.fence,
                    )
            except TurnCheckpointConflict:
                continue  # settled meanwhile
            self.progress.settled_by_operator += 1


class _Life:
    """One worker process, from its start to its end."""

    def __init__(self, supervisor: Supervisor, keeper: Keeper, ledger: Ledger) -> None:
        self._boss = supervisor
        self._keeper = keeper
        self._ledger = ledger
        self._in_hand: set[str] = set()
        self._open_turns: set[str] = set()
        self._begun = 0
        self._plan = supervisor.plan_kill()
        self._kill_timer: asyncio.TimerHandle | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._killed_at: str | None = None

    async def run(self) -> None:
        boss = self._boss
        boss.progress.workers_started += 1
        process = self._process = await asyncio.create_subprocess_exec(
            *boss.command(self._plan),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            limit=1 << 20,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.create_task(process.stderr.read())
        while line := await process.stdout.readline():
            await self._heard(msgspec.json.decode(line))
        status = await process.wait()
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        if self._killed_at is not None and status == -signal.SIGKILL:
            boss.killed(self._killed_at, in_a_turn=bool(self._open_turns))
        elif self._plan is not None:
            boss.spared()
        for conversation in self._in_hand:
            boss.gave_up(conversation)
        told = (await errors).decode(errors="replace")
        if status not in (0, -signal.SIGKILL):
            raise WorkerFailed(f"a worker ended with status {status}:\n{told}")

    async def _heard(self, message: dict[str, Any]) -> None:
        boss = self._boss
        match message:
            case {"ready": True}:
                for _ in range(boss.at_once()):
                    self._hand_out()
            case {"begin": turn_id}:
                self._open_turns.add(turn_id)
                if turn_id not in boss.progress.turns_done:
                    self._begun += 1
                self._maybe_kill()
            case {"end": turn_id, "status": "success"}:
                self._open_turns.discard(turn_id)
                boss.turn_done(turn_id)
            case {"end": turn_id, "status": "reconciliation_required", "open": open_slots}:
                self._open_turns.discard(turn_id)
                await boss.settle(turn_id, open_slots, self._keeper, self._ledger)
            case {"end": turn_id, "status": status, "message": text}:
                raise WorkerFailed(f"turn {turn_id} ended with {status}: {text}")
            case {"done": conversation_id}:
                self._in_hand.discard(conversation_id)
                boss.finished(conversation_id)
                self._hand_out()
            case {"at": boundary}:
                self._kill(boundary)
            case _:
                raise WorkerFailed(f"a worker said {message!r}")

    def _hand_out(self) -> None:
        conversation = self._boss.next_conversation()
        if conversation is not None:
            self._in_hand.add(conversation)
            self._order(conversation=conversation)
        elif not self._in_hand:
            self._order(stop=True)

    def _order(self, **order: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")

    def _maybe_kill(self) -> None:
        if self._plan is None or self._killed_at is not None:
            return
        after, boundary = self._plan.after, self._plan.boundary
        if boundary is not None and self._begun >= after + _PASSES_BY:
            boundary = None  # the turns that were begun since do not come by there
            if self._kill_timer is not None:
                self._kill_timer.cancel()
                self._kill_timer = None
        if self._begun >= after and self._kill_timer is None:
            delay = self._boss.random_delay() if boundary is None else _NEVER_COMES
            self._kill_timer = asyncio.get_running_loop().call_later(delay, self._kill, "a random instant")

    def _kill(self, at: str) -> None:
        if self._process is not None and self._process.returncode is None and self._killed_at is None:
            if not self._open_turns:
                # Between two turns a kill proves nothing: wait for the next one.
                self._kill_timer = asyncio.get_running_loop().call_later(0.002, self._kill, at)
                return
            self._killed_at = at
            self._process.send_signal(signal.SIGKILL)


async def supervise(
    orders: Orders,
    conversations: list[Conversation],
    *,
    workers: int,
    kills: int,
    seed: int,
    show: Callable[[Progress], None],
) -> tuple[Progress, float]:
    """Run the demo to its end; how it went, and the seconds that it took."""
    started = time.monotonic()
    ledger = Ledger(Path(orders.ledger))
    try:
        async with await Keeper.open(orders.store) as keeper:
            supervisor = Supervisor(orders, conversations, workers=workers, kills=kills, seed=seed, show=show)
            await supervisor.run(keeper, ledger)
    finally:
        ledger.close()
    return supervisor.progress, time.monotonic() - started
