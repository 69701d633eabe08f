"""Real sessions on a real store, driven at random by several workers, against `reference.py` (invariants of flows.md).

Every answer is compared, and behind every step the whole turn as another worker sees it. Time is the store's, and moves only
when the test moves it; where a server's clock runs as well (`test_stateful_servers.py`), by what comes to nothing beside a tick.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.conformance.support import ClockedStore
from tests.model.reference import CLAIM_LEASE, EXECUTION_LEASE, Answer, Call, Error, Journal
from turnkeeper.errors import TurnCheckpointConflict, TurnCheckpointError
from turnkeeper.log import frames
from turnkeeper.log.record import NOWHERE
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn import records as r
from turnkeeper.turn.evolve import TurnRules
from turnkeeper.turn.handle import TurnHandle
from turnkeeper.turn.names import ToolCallState
from turnkeeper.turn.session import TurnCheckpointSession
from turnkeeper.turn.snapshot import ToolCallDecision
from turnkeeper.turn.state import TurnState, find_slot

T = TypeVar("T")

WORKERS: Final = 3
BEGINNING: Final = 1_000_000_000
TICK: Final = 250_000
"""No sum of ticks comes near the end of a lease, so the few milliseconds that a session's estimate is off do not matter."""
LONG: Final = "long enough to be stored once in a round and only referred to afterwards: "

CHARGE: Final = Call("call_0", "charge", {"cents": 500, "customer": "c1"})
CHARGE_AGAIN: Final = Call("call_0", "charge", {"customer": "c1", "cents": 500})
MAIL: Final = Call("", "mail", {"text": LONG})
DECISIONS: Final[list[list[Call]]] = [[], [CHARGE], [CHARGE_AGAIN, MAIL], [MAIL]]

flags = st.booleans()
usually = st.sampled_from([True, True, True, True, False])
drawn: Final[dict[str, st.SearchStrategy[Any]]] = {
    "as_before": usually,
    "begin": flags,
    "decision": st.sampled_from([0, 1, 1, 2, 2, 3]),
    "kind": st.integers(0, 9),
    "last": usually,
    "offset": st.integers(-2, 2),
    "repeat": flags,
    "resolution": st.sampled_from(["happened", "did_not_happen", "unknown"]),
    "right": usually,
    "safe": flags,
    "slot": st.integers(0, 1),
    "ticks": st.sampled_from([1, 2, 5]),
    "variant": st.integers(0, 1),
    "verb": st.sampled_from(["begin", "begin", "renew", "abandon"]),
    "what": st.sampled_from(["start", "decide", "commit", "final", "reply", "delivered", "complete"]),
    "worker": st.integers(0, WORKERS - 1),
}
often: Final = {
    "next_step": 4,
    "next_step_of_a_slot": 7,
    "any_step": 2,
    "claim": 2,
    "own": 2,
    "finish": 2,
    "resolve": 1,
    "release": 1,
    "time_passes": 1,
    "dies": 1,
}


def _arguments(name: str) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    names = list(inspect.signature(getattr(Turn, name)).parameters)[1:]
    return st.tuples(st.just(name), st.fixed_dictionaries({n: drawn[n] for n in names}))


actions = st.sampled_from([name for name, n in often.items() for _ in range(n)]).flatmap(_arguments)


def _raised(e: TurnCheckpointError) -> Error:
    return "conflict" if isinstance(e, TurnCheckpointConflict) else "error"


class Turn(RuleBasedStateMachine):
    """One turn, several sessions of it, and the reference."""

    trace = "trace"
    past_the_last_tick = 1
    """The proof deadline's distance to the last tick that is before it, in milliseconds: room for a clock that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.store = self.run(self.open())
        self.sessions: list[TurnCheckpointSession] = []
        self.tokens: list[str] = []
        self.lives = 0
        self.effects: dict[str, int] = {}
        self.fences: dict[tuple[int, int], tuple[str, int]] = {}

    async def open(self) -> ClockedStore:
        """The store of this walk, without its turn. Here it is in memory, and its clock stands still."""
        return await SqliteStore.open(":memory:", clock=lambda: BEGINNING)

    async def close(self) -> None:
        """Let go of it."""
        await self.store.close()

    def run(self, awaitable: Awaitable[T]) -> T:
        """Run on the machine's own loop."""

        async def waited() -> T:
            return await awaitable

        return self.runner.run(waited())

    @initialize(ticks=st.sampled_from([0, 0, 10]), report=flags, started=usually)
    def settings_of_all(self, ticks: int, report: bool, started: bool) -> None:
        """The settings that all workers share; `ticks` until the proof deadline, or 0 for none."""
        beginning = self.run(self.store.read("turn:none")).now
        deadline = beginning + ticks * TICK + self.past_the_last_tick if ticks else 0
        self.journal = Journal(deadline, report, now=beginning)
        for worker in range(WORKERS):
            self.sessions.append(self._session())
            self.tokens.append(f"worker {worker}")
        if started:
            self.next_step(0, 0, 1, 0)

    def _session(self) -> TurnCheckpointSession:
        return TurnCheckpointSession(
            self.store,
            self.trace,
            claim_lease_seconds=CLAIM_LEASE / 1000,
            execution_lease_seconds=EXECUTION_LEASE / 1000,
            proof_deadline_ms=self.journal.proof_deadline,
            report_ambiguous=self.journal.report_ambiguous,
        )

    def teardown(self) -> None:
        """The log itself, record by record, then let go of everything."""
        try:
            if self.sessions:
                self._replay()
                self._audit_log()
        finally:
            self.run(self.close())
            self.runner.close()

    @rule(act=actions)
    def act(self, act: tuple[str, dict[str, Any]]) -> None:
        """Anything. (One rule: with many, most walks would be ones in which half of them are switched off.)"""
        name, arguments = act
        getattr(self, name)(**arguments)

    # --- time and death --------------------------------------------------------------------------------------

    def time_passes(self, ticks: int) -> None:
        """The store's clock moves on."""
        self.run(self.store.advance_clock(ticks * TICK))
        self.journal.now += ticks * TICK

    def dies(self, worker: int) -> None:
        """A worker loses its memory, and comes back under another owner token."""
        self.lives += 1
        self.sessions[worker] = self._session()
        self.tokens[worker] = f"worker {worker} life {self.lives}"

    # --- the turn --------------------------------------------------------------------------------------------

    def _same(self, expected: Error | None, awaitable: Awaitable[T]) -> T | None:
        value, refused = None, None
        try:
            value = self.run(awaitable)
        except TurnCheckpointError as e:
            refused = e
        given = refused and _raised(refused)
        assert given == expected, f"{refused!r}, where the reference says {expected}"
        return value

    def _start(self, worker: int, variant: int, inbound: str) -> None:
        """T2 `start`: same inbound message, prompts that differ."""
        messages = [{"role": "user", "content": f"{LONG}{variant}"}, {"role": "system", "content": LONG}]
        runtime = {"inbound": {"id": inbound}, "of": variant}
        expected = self.journal.start(messages, ["charge", "mail"], runtime)
        self._same(expected, self.sessions[worker].start(messages, ["charge", "mail"], runtime))

    def _reserve(self, worker: int, index: int, variant: int, decision: int) -> None:
        calls = DECISIONS[decision]
        response: dict[str, Any] = {"content": f"{LONG}{variant}", "tool_calls": [_wire(call) for call in calls]}
        expected = self.journal.reserve_assistant(index, response, calls)
        given = self._same(expected, self.sessions[worker].reserve_assistant(index, response))
        if expected is None:
            assert given == self.journal.rounds[index].response

    def _commit(self, worker: int, index: int, variant: int) -> None:
        results = [
            slot.result for slot in (self.journal.rounds[index].slots if 0 <= index <= self.journal.current_round else [])
            if slot is not None
        ]  # fmt: skip
        messages = [*self.journal.messages, {"content": f"{LONG}{variant}"}, {"results": results}]
        runtime = {"of": variant, "round": index}
        expected = self.journal.commit_round(index, messages, runtime)
        self._same(expected, self.sessions[worker].commit_round(index, messages, runtime))

    def next_step(self, worker: int, variant: int, decision: int, kind: int) -> None:
        """Whatever comes next for the turn, so that turns get somewhere."""
        current = self.journal.current_round
        match self.journal.phase:
            case None:
                self._start(worker, variant, "m1")
            case "STARTED" | "ROUND_COMMITTED" if kind and current < 2:
                self._reserve(worker, current + 1, variant, decision)
            case "ASSISTANT_RESERVED" if kind:
                self._commit(worker, current, variant)
            case "STARTED" | "ROUND_COMMITTED" | "ASSISTANT_RESERVED":
                self._final(worker, variant)
            case "FINAL_MODEL_SAVED":
                self._reply(worker, variant, "key")
            case "DELIVERY_RESERVED":
                self._delivered(worker, "key", variant)
            case _:
                self._complete(worker, allow_no_output=not kind)

    def any_step(self, worker: int, what: str, offset: int, variant: int, decision: int, as_before: bool) -> None:
        """Any step of the turn, in order or not."""
        index = self.journal.current_round + offset
        key = "key" if as_before else "other key"
        match what:
            case "start":
                self._start(worker, variant, "m1" if as_before else "m2")
            case "decide" if index < 3:
                self._reserve(worker, index, variant, decision)
            case "commit":
                self._commit(worker, index, variant)
            case "final" if not as_before:  # so that not every turn ends here
                self._final(worker, variant)
            case "reply":
                self._reply(worker, variant, key)
            case "delivered":
                self._delivered(worker, key, variant)
            case _:
                self._complete(worker, allow_no_output=not as_before and offset == 2)

    def _final(self, worker: int, variant: int) -> None:
        """T2 `save_final_model`."""
        content = f"{LONG}{variant}"
        expected = self.journal.save_final_model(content)
        given = self._same(expected, self.sessions[worker].save_final_model(content))
        assert expected is not None or given == self.journal.final

    def _reply(self, worker: int, variant: int, key: str) -> None:
        """T2 `reserve_final_delivery`: sometimes the final text, sometimes another."""
        text, delivery = f"{LONG}{variant}", {"variant": variant} if variant else None
        expected = self.journal.reserve_final_delivery(key, text, delivery)
        self._same(expected, self.sessions[worker].reserve_final_delivery(key, text, delivery))

    def _delivered(self, worker: int, key: str, message: int) -> None:
        """T2 `mark_delivered`."""
        expected = self.journal.mark_delivered(key, f"message {message}")
        self._same(expected, self.sessions[worker].mark_delivered(key, f"message {message}"))

    def _complete(self, worker: int, allow_no_output: bool) -> None:
        """T2 `mark_completed`."""
        expected = self.journal.mark_completed(allow_no_output=allow_no_output)
        self._same(expected, self.sessions[worker].mark_completed(allow_no_output=allow_no_output))

    # --- slots -----------------------------------------------------------------------------------------------

    def _slot(self, index: int, slot: int, expected: Answer | Error, given: Awaitable[ToolCallDecision]) -> None:
        if isinstance(expected, str):
            self._same(expected, given)
            return
        decision = self.run(given)
        note(f"round {index} slot {slot}: {decision.action.value}")
        there = expected.slot
        assert decision.action.value == expected.action
        assert decision.operation_id == self.sessions[0].logical_operation_id(index, slot)
        assert decision.should_begin is decision.should_execute is (expected.action == "BEGUN")
        assert (decision.state and decision.state.value) == (there and there.state)
        assert (decision.owner_token, decision.fence) == ((there.owner, there.fence) if there else (None, 0))
        assert decision.terminal is (there is not None and there.state in ("COMPLETED", "AMBIGUOUS"))
        assert decision.cached_result == (there.result if there and there.state == "COMPLETED" else None)
        if decision.should_begin and there is not None and not there.replay_safe:
            self._effect(decision.operation_id)
        if there is not None and expected.action == "ABANDONED":
            self.effects[decision.operation_id] = 0  # given back, or resolved as not having happened

    def _effect(self, operation_id: str) -> None:
        """Invariant 2."""
        self.effects[operation_id] = self.effects.get(operation_id, 0) + 1
        assert self.effects[operation_id] == 1, "an operation that is not replay safe was begun twice"

    def next_step_of_a_slot(self, worker: int, slot: int, safe: bool, begin: bool, kind: int, variant: int) -> None:
        """Whatever comes next for a slot, so that rounds get somewhere; or time passes, and it goes wrong."""
        if self.journal.phase != "ASSISTANT_RESERVED":
            self.next_step(worker, variant, decision=1 + slot, kind=kind)
            return
        current = self.journal.current_round
        slots = self.journal.rounds[current].slots
        open_slots = [i for i, s in enumerate(slots) if s is None or s.state not in ("COMPLETED", "AMBIGUOUS")]
        if not open_slots and kind < 6:
            self._commit(worker, current, variant)
            return
        slot = open_slots[slot % len(open_slots)] if open_slots and kind else slot
        there = self.journal.slot(current, slot)
        match there.state if there else None:
            case "CLAIMED" if kind < 6:
                self.own(worker, slot, right=True, last=True, verb="begin")
            case "EXECUTING" if kind < 4:
                self.finish(worker, slot, right=True, last=True, variant=variant)
            case "EXECUTING" if kind < 5:
                self.own(worker, slot, right=True, last=True, verb="abandon")
            case "EXECUTING" if kind < 7:
                self.time_passes(5)
            case "AMBIGUOUS" if kind < 8:
                self.resolve(worker, slot, True, ["happened", "did_not_happen"][kind % 2], variant)
            case "AMBIGUOUS" if kind < 9:
                self.finish(worker, slot, right=True, last=True, variant=variant)
            case _:
                self.claim(worker, slot, right=True, last=True, safe=not safe, begin=begin, repeat=False)

    def claim(self, worker: int, slot: int, right: bool, last: bool, safe: bool, begin: bool, repeat: bool) -> None:
        """T3 `claim_tool`, mostly as the decision has it, mostly in the current round."""
        index = self.journal.current_round - (0 if last else 1)
        calls = self.journal.rounds[index].calls if index >= 0 else []
        call = calls[slot] if slot < len(calls) else CHARGE
        if not right:
            call = call._replace(tool_name="another")
        token = self.tokens[worker]
        expected = self.journal.claim_tool(
            index, slot, call, token, derived=True, replay_safe=safe, begin=begin, repeat_ambiguous=repeat
        )
        session = self.sessions[worker]
        operation_id = session.logical_operation_id(index, slot)
        given = session.claim_tool(
            index, slot, *call, operation_id, safe, token, begin=begin, repeat_ambiguous=repeat
        )  # fmt: skip
        self._slot(index, slot, expected, given)

    def _owner(self, index: int, slot: int, worker: int, right: bool) -> tuple[str, int]:
        """Who a worker takes itself for: mostly the slot's owner, a zombie of it too."""
        there = self.journal.slot(index, slot)
        if there is None:
            return self.tokens[worker], 1
        return (there.owner, there.fence) if right else (self.tokens[worker], max(there.fence - 1, 1))

    def own(self, worker: int, slot: int, right: bool, last: bool, verb: str) -> None:
        """T3 `begin_tool`, `renew_tool`, `abandon_tool`."""
        index = self.journal.current_round - (0 if last else 1)
        owner = self._owner(index, slot, worker, right)
        session = self.sessions[worker]
        match verb:
            case "begin":
                expected, given = self.journal.begin_tool(index, slot, *owner), session.begin_tool(index, slot, *owner)
            case "renew":
                expected, given = self.journal.renew_tool(index, slot, *owner), session.renew_tool(index, slot, *owner)
            case _:
                expected, given = (
                    self.journal.abandon_tool(index, slot, *owner),
                    session.abandon_tool(index, slot, *owner),
                )
        self._slot(index, slot, expected, given)

    def finish(self, worker: int, slot: int, right: bool, last: bool, variant: int) -> None:
        """T3 `complete_tool`, in time, late, or too late."""
        index = self.journal.current_round - (0 if last else 1)
        owner = self._owner(index, slot, worker, right)
        result = {"text": f"{LONG}result {variant}"}
        expected = self.journal.complete_tool(index, slot, *owner, result)
        self._slot(index, slot, expected, self.sessions[worker].complete_tool(index, slot, *owner, result))

    def resolve(self, worker: int, slot: int, last: bool, resolution: str, variant: int) -> None:
        """T3, the audited way out of AMBIGUOUS."""
        index = self.journal.current_round - (0 if last else 1)
        result = None if resolution == "did_not_happen" else {"told": f"{LONG}{variant}"}
        expected = self.journal.resolve_tool(index, slot, resolution, result)
        given = self.sessions[worker].resolve_tool(
            index, slot, resolution, who="operator", why="looked", result_record=result
        )  # fmt: skip
        self._slot(index, slot, expected, given)

    def release(self, worker: int, slot: int, right: bool) -> None:
        """Somebody takes what an owner holds, however lately it was heard of."""
        owner, _ = self._owner(self.journal.current_round, slot, worker, right)
        expected = self.journal.release(owner)
        handle = TurnHandle(self.store, self.trace)
        self._same(expected, handle.release(owner, who="operator", why="it is dead", force=True))

    # --- what must hold --------------------------------------------------------------------------------------

    @precondition(lambda self: bool(self.sessions))
    @invariant()
    def looks_the_same(self) -> None:
        """Invariants 5, 6, 8: the whole turn, as a worker sees it that did not write last."""
        journal, session = self.journal, self.sessions[self.lives % WORKERS]
        snapshot = self.run(session.load())
        if snapshot is None:
            assert journal.phase is None
            return
        assert snapshot.phase.value == journal.phase
        assert snapshot.completed is (journal.phase == "COMPLETED")
        assert snapshot.revision == journal.revision
        assert snapshot.current_round == journal.current_round
        assert snapshot.messages == journal.messages
        assert snapshot.tool_names == journal.tool_names
        assert snapshot.runtime == journal.runtime
        assert snapshot.final_model == journal.final
        reply = journal.reply or (None, None, None)
        assert (snapshot.reply_message_key, snapshot.final_text, snapshot.final_delivery) == reply
        assert snapshot.sent_message_id == journal.sent
        assert snapshot.assistant_responses == {i: round_.response for i, round_ in enumerate(journal.rounds)}
        for index, round_ in enumerate(journal.rounds):
            for slot, there in enumerate(round_.slots):
                if there is not None:
                    self._fence(index, slot, there.owner, there.fence)

    def _fence(self, index: int, slot: int, owner: str, fence: int) -> None:
        before = self.fences.get((index, slot))
        if before is not None and before[0] != owner:
            assert fence > before[1], "the fence grows at each change of owner"
        self.fences[index, slot] = (owner, fence)

    def _replay(self) -> None:
        """Invariant 10: a redelivery of a finished turn changes nothing."""
        if self.journal.phase != "COMPLETED":
            return
        self._start(0, 1, "m1")
        self._complete(1, allow_no_output=True)
        for index, round_ in enumerate(self.journal.rounds):
            self._reserve(2, index, 1, 0)
            for slot, there in enumerate(round_.slots):
                if there is not None and there.state == "COMPLETED":
                    call, token = round_.calls[slot], self.tokens[0]
                    operation_id = self.sessions[0].logical_operation_id(index, slot)
                    given = self.sessions[0].claim_tool(index, slot, *call, operation_id, False, token, begin=True)
                    self._slot(index, slot, Answer("CACHED", there), given)
        self.looks_the_same()

    def _audit_log(self) -> None:
        """Invariant 12, from the bytes in the store: what is ambiguous is left through an audited record alone."""
        session = self.sessions[0]
        tail = self.run(self.store.read(session.key, after=NOWHERE))
        rules = TurnRules(0)
        decoder, state = rules.decoder(), rules.initial()
        for record in tail.records:
            _, entry = decoder.decode(frames.decode(record.body))
            after = rules.evolve(state, entry, record.at)
            assert after.revision == state.revision + 1
            self._audit_record(state, entry, after)
            state = after
        assert self.run(session.log.read()) == state, "a fold from the first record on gives what the sessions hold"

    def _audit_record(self, state: TurnState, entry: r.AnyRecord, after: TurnState) -> None:
        for index, round_ in enumerate(self.journal.rounds):
            for slot in range(len(round_.slots)):
                before, now = find_slot(state, index, slot), find_slot(after, index, slot)
                if before is None or before.state is not ToolCallState.AMBIGUOUS:
                    continue
                assert now is not None
                if now.state is not ToolCallState.AMBIGUOUS or now.resolution is not before.resolution:
                    assert isinstance(entry, r.ToolResolved)
                    assert entry.who
                    assert entry.why


def _wire(call: Call) -> dict[str, Any]:
    return {"id": call.provider_call_id, "name": call.tool_name, "arguments": call.arguments}


# Generous: on a machine that does much else, hypothesis needs several times the forty seconds that it takes alone.
pytestmark = pytest.mark.timeout(600)

WALKS: Final = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,  # the same walks in every run: a failure here is one everywhere
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

TestTurn = Turn.TestCase
TestTurn.settings = WALKS


@pytest.mark.soak
def test_many_more_walks() -> None:
    """As `TestTurn`."""
    run_state_machine_as_test(Turn, settings=settings(WALKS, max_examples=400))
