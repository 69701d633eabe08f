"""Two replicas that race through one conversation: stale views, crashes, zombies, lost replies, three kinds of platform.

A replica is what it remembers, nothing more, and puts its commands as the shell does (`conversations.py`, `run.py`, `pen.py`,
`outlet.py`). Between two of its steps anything may happen, for any time. What goes wrong is paid for out of a budget of
faults: a crash, a lease that ends under a live owner (which makes it a zombie), a lost reply of the store or of the platform.
So every state has to have a way to a good end that needs no further fault. Replicas are interchangeable.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final

from msgspec.structs import replace

from tests.model.conversations_book import Book, Put, check_replays
from tests.model.conversations_replica import (
    BURIED,
    NAMES,
    At,
    Replica,
    Run,
    Settings,
    World,
    failed,
    order,
    salvage,
    with_,
)
from tests.model.world import Broken, Event
from turnkeeper.conversation import commands as c
from turnkeeper.conversation.decide import Claimed, Receipt
from turnkeeper.conversation.outbox import SendAnswer
from turnkeeper.conversation.state import Answer, ConversationState, SendKey, SendState, find_send

MESSAGES: Final = tuple(c.Receive("c", b"seed", bytes([n]) * 12, "text", b"message %d" % n) for n in range(1, 5))


class Conversation:
    """The world of `Settings`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.book = Book(settings.rules, audited=settings.audited)
        self._checked: set[int] = set()
        self._asked: dict[tuple[int, int, Replica], tuple[str, list[Put]]] = {}
        self._flushed: dict[tuple[int, int, Run], list[Put]] = {}
        self._lost: dict[tuple[int, int, int], bool] = {}

    def initial(self) -> World:
        """Nothing has come yet."""
        return World(self.book.number(ConversationState()), faults=self.settings.faults)

    # --- what the replicas ask -------------------------------------------------------------------------------

    @cache  # noqa: B019  # a world lives as long as its test
    def _start(self) -> c.Start:
        return c.Start("flow", 1, "0", b"", self.settings.first_wait)

    def _claim(self, name: str, replica: Replica) -> c.Claim:
        live = replica.live
        start = None if replica.intent == "unasked" else self._start()
        return c.Claim(
            name,
            1,
            replica.about,
            replica.intent,  # type: ignore[arg-type]
            start,
            None if live is None else self.book.row(live.row).revision,
            2 if self.settings.poison else 99,
            self.settings.on_poison,
        )

    def _content(self, run: Run) -> tuple[bytes, str]:
        if run.aside:
            text = f"{run.aside} {run.number}"
        else:
            row = self.book.row(run.row)
            text = f"{row.step}.{run.op} with {[one.number for one in row.answers[: run.waits]]} to {run.cause[0]}"
        return text.encode(), text

    def _ahead(self, name: str, run: Run) -> list[c.Command]:
        """What the pen had deferred."""
        ahead: list[c.Command] = [
            c.SettleSend(name, run.fence, SendKey(*key), outcome, message_id="id" if outcome == "sent" else "")  # type: ignore[arg-type]
            for key, outcome in run.deferred
        ]
        if run.dirty:
            ahead.append(c.SetRow(name, run.fence, self.book.row(run.row)))
        return ahead

    def _commands(self, log: int, name: str, replica: Replica) -> list[c.Command]:
        run = replica.run
        if replica.at == At.CLAIM:
            return [self._claim(name, replica)]
        assert run is not None
        match replica.at:
            case At.SEND | At.AGAIN:
                content, fingerprint = self._content(run)
                if run.stray is not None:
                    stray = find_send(self.book[log], SendKey(*run.stray))
                    # A zombie may know one that is forgotten by now; it is told that it is no owner.
                    content, fingerprint = (b"", "") if stray is None else (stray.content, stray.fingerprint)
                asks = not run.aside and self._op(run) == "a"
                watermark = asks and self.settings.first_wait
                again = replica.at == At.AGAIN
                begin = c.BeginSend(name, run.fence, SendKey(*run.key), content, fingerprint, watermark, again)
                return [*self._ahead(name, run), begin]
            case At.PARK:
                return [*self._ahead(name, run), c.Settle(name, run.fence, run.number, "parked")]
            case At.END:
                ends = not run.aside or run.aside == "cancel"
                end = [c.EndFlow(name, run.fence, run.number, "done")] if ends else []
                return [*self._ahead(name, run), *end, c.Settle(name, run.fence, run.number, "handled")]
            case At.SALVAGE:
                return self._ahead(name, run._replace(dirty=False))
            case At.PUT_BACK:
                return [c.ReturnMessage(name, run.fence, run.number, "failed", 0, counts=run.fails)]
            case _:
                raise AssertionError(replica.at)

    # --- what may happen -------------------------------------------------------------------------------------

    def successors(self, world: World) -> Iterator[tuple[Event, World]]:
        """Every event that may come next."""
        for event, after in self._events(world):
            yield event, self._canonical(after)

    def _events(self, world: World) -> Iterator[tuple[Event, World]]:
        state = self.book[world.log]
        if state.received < len(self.settings.messages):
            yield ("message", state.received + 1, "comes"), world._replace(log=self._received(world.log))
        yield from self._tick(world, state)
        if self.settings.operator:
            yield from self._operate(world, state)
        if self.settings.releases and state.owner and state.lease_end:
            yield from self._release(world, state)
        for i, replica in enumerate(world.replicas):
            yield from self._act(world, i, replica)
            if world.faults and replica != Replica():
                yield (NAMES[i], "crashes"), self._crash(world, i)

    def _received(self, log: int) -> int:
        number = self.book[log].received
        (put,) = self.book.put(log, [MESSAGES[number]])
        if put.answers != (Receipt(number + 1, duplicate=False),):
            raise Broken("J2: a message's number is the next one", put.answers)
        return put.log

    def _tick(self, world: World, state: ConversationState) -> Iterator[tuple[Event, World]]:
        later = self.book.tick(world.log)
        if later == world.log:
            return
        if state.lease_end != 1 or not self._lives(world, state):
            yield ("the clock ticks",), world._replace(log=later)
        elif world.faults:
            yield ("the lease ends",), world._replace(log=later, faults=world.faults - 1)

    def _lives(self, world: World, state: ConversationState) -> bool:
        if self.settings.same_name and state.owner in NAMES:
            return world.replicas[NAMES.index(state.owner)] != Replica()
        return state.owner in NAMES

    def _release(self, world: World, state: ConversationState) -> Iterator[tuple[Event, World]]:
        costs = int(self._lives(world, state))
        if world.faults >= costs:
            taken = c.TakeAway(state.owner, "somebody", "it is dead", force=True)
            for put in self.book.put(world.log, [taken]):
                yield ("somebody", "releases"), world._replace(log=put.log, faults=world.faults - costs)

    def _crash(self, world: World, i: int) -> World:
        log = world.log if self.settings.same_name else self.book.rename(world.log, ((NAMES[i], BURIED),))
        return with_(world, i, Replica())._replace(log=log, faults=world.faults - 1)

    def _operate(self, world: World, state: ConversationState) -> Iterator[tuple[Event, World]]:
        commands: list[c.Command] = [
            c.ResolveSend(send.key, sent, "somebody", "looked")
            for send in state.sends
            if send.state is SendState.AMBIGUOUS
            for sent in (True, False)
        ]
        commands += [
            c.ResolveMessage(one.number, True, "somebody", "looked")
            for one in state.inbound
            if one.quarantined is not None
        ]
        for command in commands:
            for put in self.book.put(world.log, [command]):
                yield ("somebody", type(command).__name__), world._replace(log=put.log)

    def _act(self, world: World, i: int, replica: Replica) -> Iterator[tuple[Event, World]]:
        name = NAMES[i]
        match replica.at:
            case At.LOOK:
                yield from self._look(world, i, replica)
            case At.EFFECT:
                yield from self._effect(world, i, replica)
            case At.DOUBT:
                yield (name, "is in doubt"), self._doubt(world, i, replica)
            case At.PARK | At.END if (stray := self._stray(world, i, replica)) is not None:
                yield (name, "has a stray send"), stray
            case _:
                yield from self._ask(world, i, replica)
        run = replica.run
        if run is not None and At.SEND <= replica.at <= At.END:
            if run.deferred and replica.at != At.EFFECT:
                yield from self._flush(world, i, replica, run)
            if self._is_lost(world.log, i, run.fence):
                stopped = replica._replace(at=salvage(run), run=run._replace(dirty=False), live=None)
                yield (name, "finds its lease gone"), with_(world, i, stopped)

    def _stray(self, world: World, i: int, replica: Replica) -> World | None:
        run = replica.run
        assert run is not None
        known = {key for key, _ in run.deferred}
        sends = self.book[world.log].sends
        send = next((one for one in sends if not one.settled and one.key[:2] not in known), None)
        if send is None:
            return None
        key = send.key[:2]
        if send.state is SendState.RETRY:
            return with_(world, i, replica._replace(run=run._replace(deferred=(*run.deferred, (key, "refused")))))
        return self._doubt(world, i, replica._replace(run=run._replace(stray=key)))

    def _look(self, world: World, i: int, replica: Replica) -> Iterator[tuple[Event, World]]:
        state = self.book[world.log]
        head = state.head
        if head is None:
            return
        kind = self.settings.messages[head.number - 1]
        intent = "start"
        if state.flow is not None:
            intent = {"text": "answer", "edit": "unasked", "cancel": "cancel", "restart": "restart"}[kind]
        elif kind == "edit":
            intent = "unasked"
        yield (NAMES[i], "looks"), with_(world, i, replica._replace(at=At.CLAIM, about=head.number, intent=intent))

    def _flush(self, world: World, i: int, replica: Replica, run: Run) -> Iterator[tuple[Event, World]]:
        key = (world.log, i, run)
        puts = self._flushed.get(key)
        if puts is None:
            puts = self._flushed[key] = self.book.put(world.log, self._ahead(NAMES[i], run))
        for put in puts:
            if put.appended:
                row = self._written(put.log, run)
                flushed = replica._replace(run=run._replace(deferred=(), dirty=False, row=row))
                yield (NAMES[i], "flushes"), with_(world._replace(log=put.log), i, flushed)

    def _ask(self, world: World, i: int, replica: Replica) -> Iterator[tuple[Event, World]]:
        name = NAMES[i]
        key = (world.log, i, replica)
        found = self._asked.get(key)
        if found is None:
            commands = self._commands(world.log, name, replica)
            found = self._asked[key] = type(commands[-1]).__name__, self.book.put(world.log, commands)
        what, puts = found
        for put in puts:
            here = world._replace(log=put.log)
            if put.refused is not None:
                raise Broken("no command of a run is refused", (what, put.refused.__name__))
            told = self._told(here, i, replica, put)
            yield (name, what, put.answers[-1]), told
            if put.appended and world.faults:
                # The answer is lost, and was not found out either.
                yield (name, what, "without an answer"), self._unanswered(here, i, replica)
        if world.faults:
            yield (name, what, "fails"), self._unanswered(world, i, replica)

    def _unanswered(self, world: World, i: int, replica: Replica) -> World:
        run = replica.run
        world = world._replace(faults=world.faults - 1)
        if run is None or replica.at == At.PUT_BACK:
            return with_(world, i, Replica(live=replica.live))
        return with_(world, i, failed(run))

    def _is_lost(self, log: int, i: int, fence: int) -> bool:
        """What the renewal of a lease comes to."""
        key = (log, i, fence)
        found = self._lost.get(key)
        if found is None:
            puts = self.book.put(log, [c.Renew(NAMES[i], fence, 1)])
            found = self._lost[key] = any(put.lost for put in puts)
        return found

    # --- answers ---------------------------------------------------------------------------------------------

    def _told(self, world: World, i: int, replica: Replica, put: Put) -> World:
        if put.lost:
            return with_(world, i, Replica())
        if replica.at == At.CLAIM:
            return self._claimed(world, i, replica, put.answers[0])
        run = replica.run
        assert run is not None
        if replica.at == At.SALVAGE:
            return with_(world, i, replica._replace(at=At.PUT_BACK, run=run._replace(deferred=())))
        if replica.at == At.PUT_BACK:
            return with_(world, i, Replica(live=replica.live if run.aside == "unasked" else None))
        run = run._replace(deferred=(), dirty=False, row=self._written(put.log, run) if run.dirty else run.row)
        if replica.at == At.PARK:
            return with_(world, i, Replica(live=run))
        if replica.at == At.END:
            return with_(world, i, Replica(live=replica.live if run.aside == "unasked" else None))
        answer: SendAnswer = put.answers[-1]
        match answer.what:
            case "begun":
                run = run._replace(again=replica.at == At.AGAIN)
                return with_(world, i, replica._replace(at=At.EFFECT, run=run))
            case "known":
                assert answer.send is not None
                if answer.send.state is SendState.DEAD and self.settings.poison:
                    return with_(world, i, failed(run))
                return self._sent(world, i, replica, run)
            case "in_doubt":
                return with_(world, i, replica._replace(at=At.DOUBT, run=run))
            case "later":  # its process's clock is behind: it asks again
                return with_(world, i, replica._replace(run=run))
            case "held":
                raise Broken("a send is never held up where nothing is sent out of order (O3)", answer)

    def _written(self, log: int, run: Run) -> int:
        row = self.book[log].row
        assert row is not None
        return self.book.row_number(row) if run.dirty else run.row

    def _claimed(self, world: World, i: int, replica: Replica, claimed: Claimed) -> World:
        if claimed.what != "work":
            back = Replica(live=replica.live)
            return with_(world, i, back)
        message, row = claimed.message, claimed.row
        assert message is not None
        if claimed.mode in ("unasked", "cancel"):
            run = Run(message.number, claimed.fence, self.book.row_number(row), aside=claimed.mode)
            run = run._replace(cause=(message.number, 0), given=message.number)
            live = replica.live if claimed.mode == "unasked" else None
            return with_(world, i, Replica(At.SEND, run=run, live=live))
        assert row is not None
        number = self.book.row_number(row)
        live = replica.live
        if claimed.mode == "continue":
            assert live is not None
            run = live._replace(number=message.number, fence=claimed.fence, row=number)
            return self._feed(world, i, run, message.number)
        if claimed.mode not in ("begin", "resume", "answer", "woken"):
            raise Broken(f"no mode {claimed.mode} without timers", claimed)
        given = message.number if row.message is None else row.message.number
        run = Run(message.number, claimed.fence, number, cause=row.cause, given=given)
        return self._go(world, i, run)

    def _op(self, run: Run) -> str:
        ops = self.settings.steps[int(self.book.row(run.row).step)]
        return ops[run.op] if run.op < len(ops) else ""

    def _go(self, world: World, i: int, run: Run) -> World:
        """To the next thing that the step wants."""
        if self._op(run):
            return with_(world, i, Replica(At.SEND, run=run))
        row = self.book.row(run.row)
        if int(row.step) + 1 == len(self.settings.steps):
            return with_(world, i, Replica(At.END, run=run))
        entered = replace(
            row,
            step=str(int(row.step) + 1),
            entry=row.entry + 1,
            inbound=run.number,
            cause=run.cause,
            answers=(),
            parked=False,
            message=Answer(run.given, "text", b"message %d" % run.given, 0),
        )
        return self._go(world, i, run._replace(row=self.book.row_number(entered), dirty=True, op=0, waits=0))

    def _sent(self, world: World, i: int, replica: Replica, run: Run) -> World:
        """The send is settled, or its outcome is deferred: go on behind it."""
        if run.stray is not None:
            at_end = bool(run.aside) or not self._op(run)
            return with_(world, i, replica._replace(at=At.END if at_end else At.PARK, run=run._replace(stray=None)))
        prompt, (record, sequence) = run.cause, run.cause
        run = run._replace(cause=(record, sequence + 1), again=False)
        if run.aside:
            return with_(world, i, replica._replace(at=At.END, run=run))
        if self._op(run) == "s":
            return self._go(world, i, run._replace(op=run.op + 1))
        row = self.book.row(run.row)
        if run.waits < len(row.answers):
            return self._feed(world, i, run, row.answers[run.waits].number)
        kept = not row.first_wait or run.waits == 0
        send = next((one for one in self.book[world.log].sends if one.key[:2] == prompt), None)
        parked = replace(
            row,
            parked=kept,
            inbound=run.number,
            answers=() if row.first_wait else row.answers,
            cause=row.cause if kept else run.cause,
            message=row.message if kept else Answer(run.given, "text", b"message %d" % run.given, 0),
            watermark=0 if send is None else send.watermark,
        )
        return with_(world, i, Replica(At.PARK, run=run._replace(row=self.book.row_number(parked), dirty=True)))

    def _feed(self, world: World, i: int, run: Run, number: int) -> World:
        """The wait that the run is at is answered by a message."""
        row = self.book.row(run.row)
        fed = (number, (row.instance, row.entry, run.waits))
        if fed not in world.fed:
            world = world._replace(fed=tuple(sorted((*world.fed, fed))))
        return self._go(world, i, run._replace(op=run.op + 1, waits=run.waits + 1, cause=(number, 0), given=number))

    # --- the platform ----------------------------------------------------------------------------------------

    def _effect(self, world: World, i: int, replica: Replica) -> Iterator[tuple[Event, World]]:
        run = replica.run
        assert run is not None
        name, key = NAMES[i], run.key
        if self.settings.poison and run.number == 1:
            dead = run._replace(deferred=(*run.deferred, (key, "refused")))
            yield (name, "is refused"), with_(world, i, failed(dead))
            return
        out = self._accept(world, run)
        settled = run._replace(deferred=(*run.deferred, (key, "sent")))
        yield (name, "sends", key), self._sent(out, i, replica, settled)
        if world.faults:
            dear = world.faults - 1
            doubting = replica._replace(at=At.DOUBT)
            yield (name, "sends", key, "without an answer"), with_(out._replace(faults=dear), i, doubting)
            yield (name, "no send, no answer"), with_(world._replace(faults=dear), i, doubting)
            yield (name, "sends", key, "and crashes"), self._crash(out, i)
            if not run.again:
                later = run._replace(deferred=(*run.deferred, (key, "postponed")))
                yield (
                    (name, "did not send"),
                    with_(world._replace(faults=dear), i, replica._replace(at=At.SEND, run=later)),
                )

    def _accept(self, world: World, run: Run) -> World:
        if self.settings.platform == "dedups" and any(key == run.key for key, _ in world.out):
            return world
        return world._replace(out=(*world.out, (run.key, run.number)))

    def _doubt(self, world: World, i: int, replica: Replica) -> World:
        """The channel's policy (flows.md, adapter contract, 1 to 3)."""
        run = replica.run
        assert run is not None
        key, s = run.key, self.settings
        again = s.platform == "dedups" or s.resends
        if s.platform == "finds":
            if any(key == known for known, _ in world.out):
                return self._sent(world, i, replica, run._replace(deferred=(*run.deferred, (key, "sent"))))
            others = (one for j, one in enumerate(world.replicas) if j != i)
            under_way = any(one.at == At.EFFECT and one.run is not None and one.run.key == key for one in others)
            again = s.careless or not under_way  # absence is conclusive only then
        if again:
            return with_(world, i, replica._replace(at=At.AGAIN))
        return self._sent(world, i, replica, run._replace(deferred=(*run.deferred, (key, "unknown"))))

    # --- what must hold --------------------------------------------------------------------------------------

    def check(self, world: World) -> None:
        """The invariants of flows.md that are about more than the log."""
        keys = [key for key, _ in world.out]
        if len(set(keys)) != len(keys):
            raise Broken("invariant 1: no outbox key is accepted twice", keys)
        state = self.book[world.log]
        doubtful = {send.key[:2] for send in state.sends if send.state is SendState.AMBIGUOUS}
        order = [number for key, number in world.out if key not in doubtful]
        if order != sorted(order) and self.settings.platform != "neither":
            raise Broken("invariant 4: effects of message n precede those of n + 1", world.out)
        messages = [number for number, _ in world.fed]
        if len(set(messages)) != len(messages):
            raise Broken("invariant 9: an answer is fed to exactly one wait", world.fed)
        waits = [wait for _, wait in world.fed]
        if not self.settings.first_wait and len(set(waits)) != len(waits):
            raise Broken("invariant 9: a wait is fed one answer", world.fed)
        if world.log not in self._checked:
            self._checked.add(world.log)
            check_replays(self.book, world.log, MESSAGES)

    def finished(self, world: World) -> bool:
        """Invariant 3: everything that was acknowledged is DONE or QUARANTINED, and nobody is at it."""
        state = self.book[world.log]
        if state.received < len(self.settings.messages):
            return False
        idle = all(replica.at == At.LOOK for replica in world.replicas)
        head = state.head
        held = head is not None and head.quarantined is not None
        return idle and not state.owner and (head is None or held)

    def _canonical(self, world: World) -> World:
        one, two = world.replicas
        if one == two:
            if self.book[world.log].owner == "b":
                return world._replace(log=self.book.rename(world.log, (("b", "a"),)))
        elif order(one) < order(two):
            log = self.book.rename(world.log, (("a", "b"), ("b", "a")))
            return world._replace(log=log, replicas=(two, one))
        return world
