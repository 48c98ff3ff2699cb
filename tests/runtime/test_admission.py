"""Admission: a limit that holds, no lost request, keys in turn, batches after the rest."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cray_agents.errors import Corrupt, EngineUnavailable, TooManyRequests
from cray_agents.runtime.gateway.model_calls import admission
from cray_agents.runtime.gateway.model_calls.admission import (
    RETRY_SECONDS,
    Admission,
    GatewayShares,
    Ticket,
)

KEYS = ("a", "b", "c")
STEP = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from(KEYS), st.booleans()),
    st.tuples(st.just("release"), st.integers(0, 30), st.booleans()),
    st.tuples(st.just("capacity"), st.integers(0, 5), st.booleans()),
)


async def let_tasks_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Visit:
    """A request as a task, which appends itself to `order` when it is let in."""

    def __init__(self, ticket: Ticket, order: list["Visit"]) -> None:
        self.ticket = ticket
        self.done = asyncio.Event()
        self.order = order
        self.task = asyncio.create_task(self._visit())

    async def _visit(self) -> None:
        async with self.ticket:
            self.order.append(self)
            await self.done.wait()


@pytest.mark.slow
@settings(max_examples=100)
@given(steps=st.lists(STEP, max_size=60))
def test_slots_are_never_too_many_and_never_idle(
    steps: Sequence[tuple[str, str | int, bool]],
) -> None:
    async def play() -> None:
        capacity = 2
        admission = Admission(lambda: capacity, 6, trickle=1e9)
        tickets: list[Ticket] = []
        waited: set[Ticket] = set()
        for kind, value, flag in steps:
            before = admission.inside() + admission.inside(batch=True)
            if kind == "enter":
                try:
                    tickets.append(admission.enter(str(value), flag))
                except TooManyRequests:
                    assert admission.waiting() >= 6
            elif kind == "release" and tickets:
                ticket = tickets[int(value) % len(tickets)]
                for _ in range(1 + flag):  # the second time is nothing
                    ticket.release()
                assert not ticket.inside
            elif kind == "capacity":
                capacity = int(value)
                admission.recheck()
            inside = [t for t in tickets if t.inside]
            assert len(inside) == admission.inside() + admission.inside(batch=True)
            assert admission.inside(batch=True) == sum(t.batch for t in inside)
            assert len(inside) <= max(admission.capacity, before)
            free = admission.capacity - len(inside)
            assert not (admission.waiting() and free > 0)
            if not admission.waiting():
                assert not (admission.waiting(batch=True) and free > admission.reserve)
            waited |= {t for t in tickets if not t.inside}
        for ticket in tickets:
            ticket.release()
        assert [admission.inside(b) + admission.waiting(b) for b in (False, True)] == [0, 0]

    asyncio.run(play())


@pytest.mark.parametrize("seed", range(8))
async def test_random_visits_with_cancellations(seed: int) -> None:
    """Cancel real tasks while they wait, just after they were let in, or inside."""
    chance = random.Random(seed)
    capacity = chance.choice((1, 3, 7))
    admission = Admission(capacity, 10_000, trickle=0.0)
    inside: set[int] = set()
    most = 0
    finished: list[int] = []

    async def visit(number: int, key: str, batch: bool) -> None:
        nonlocal most
        async with admission.enter(key, batch):
            inside.add(number)
            most = max(most, len(inside))
            try:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                inside.discard(number)
        finished.append(number)

    tasks: dict[int, asyncio.Task[None]] = {}
    for number in range(600):
        key, batch = chance.choice(KEYS), chance.random() < 0.3
        tasks[number] = asyncio.create_task(visit(number, key, batch))
        if chance.random() < 0.5:
            await asyncio.sleep(0)
        if chance.random() < 0.3:
            tasks[chance.randrange(number + 1)].cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    cancelled = {number for number, task in tasks.items() if task.cancelled()}
    assert sorted(finished) == sorted(set(tasks) - cancelled)
    assert 0 < len(cancelled) < len(tasks)
    assert most == capacity
    assert [admission.inside(b) + admission.waiting(b) for b in (False, True)] == [0, 0]


@settings(max_examples=100)
@given(keys=st.lists(st.sampled_from("abcde"), min_size=2, max_size=40))
def test_keys_are_served_in_turn(keys: list[str]) -> None:
    """While a key waits, no other key is let in twice. Requests of one key keep their order."""

    async def play() -> None:
        admission = Admission(1, 100)
        first = admission.enter("x")
        waiting = [admission.enter(key) for key in keys]
        while waiting:
            first.release()
            (first,) = (ticket for ticket in waiting if ticket.inside)
            assert first is next(ticket for ticket in waiting if ticket.key == first.key)
            waiting.remove(first)
            since.append(first.key)
        first.release()

    since: list[str] = []
    asyncio.run(play())
    left = Counter(keys)
    for at, key in enumerate(since):
        left[key] -= 1
        if left[key]:
            between = since[at + 1 : since.index(key, at + 1)]
            assert sorted(between) == sorted(k for k in left if left[k] and k != key)


async def test_a_full_queue_refuses_whoever_has_a_share_and_takes_the_others() -> None:
    admission = Admission(1, 8)
    tickets = [admission.enter("a")]
    tickets += [admission.enter("a") for _ in range(8)]
    with pytest.raises(TooManyRequests, match="max_queue = 8"):
        admission.enter("a")
    tickets += [admission.enter("b") for _ in range(4)]  # of two keys, half
    with pytest.raises(TooManyRequests):
        admission.enter("b")
    tickets += [admission.enter("c") for _ in range(2)]
    with pytest.raises(TooManyRequests):
        admission.enter("c")
    assert admission.waiting() == 14  # at most 8 x (1 + 1/2 + 1/3)
    for ticket in tickets:
        ticket.release()
    admission.enter("a").release()


async def test_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to retry is what the queue takes at the recent pace, spread over its second half."""
    now = 0.0
    monkeypatch.setattr(
        "cray_agents.runtime.gateway.model_calls.admission.time.monotonic", lambda: now
    )

    def retry_seconds(seconds: float) -> list[float]:
        nonlocal now
        admission = Admission(2, 10)
        for _ in range(200):
            ticket = admission.enter()
            now += seconds
            ticket.release()
        tickets = [admission.enter() for _ in range(12)]
        retries = []
        for _ in range(50):
            with pytest.raises(TooManyRequests) as caught:
                admission.enter()
            retries.append(caught.value.retry_after)
        assert admission.room().remaining == 0
        assert admission.room().reset == pytest.approx(12 * seconds / 2)
        for ticket in tickets:
            ticket.release()
        return retries

    spread = retry_seconds(0.4)
    assert 1.0 <= min(spread) < max(spread) <= 2.0
    assert set(retry_seconds(0.0001)) == {RETRY_SECONDS[0]}
    assert set(retry_seconds(1000)) == {RETRY_SECONDS[1]}


async def test_nobody_is_refused_for_a_swap() -> None:
    swapping = True
    admission = Admission(1, 2, swapping=lambda: swapping)
    tickets = [admission.enter("a") for _ in range(20)]
    swapping = False
    with pytest.raises(TooManyRequests):
        admission.enter("a")
    for ticket in tickets[:17]:
        ticket.release()
    assert [ticket.inside for ticket in tickets[17:]] == [True, False, False]
    more = [admission.enter("a") for _ in range(2)]  # requests of the swap do not count
    with pytest.raises(TooManyRequests):
        admission.enter("a")
    for ticket in (*tickets, *more):
        ticket.release()
    assert admission.waiting() == 0


async def test_a_rise_of_the_capacity_is_seen_though_nobody_leaves() -> None:
    capacity = 1
    admission = Admission(lambda: capacity)
    first = admission.enter()
    order: list[Visit] = []
    visits = [Visit(admission.enter(), order) for _ in range(3)]
    await let_tasks_run()
    assert order == []
    capacity = 3
    async with asyncio.timeout(120):
        while len(order) < 2:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.01)
    assert order == visits[:2]
    first.release()
    for visit in visits:
        visit.done.set()
    await asyncio.gather(*(visit.task for visit in visits))


async def test_without_any_replica_the_last_capacity_holds_and_then_nobody_waits() -> None:
    capacity = 2
    admission = Admission(lambda: capacity, outage=0.3)
    tickets = [admission.enter() for _ in range(2)]
    capacity = 0
    order: list[Visit] = []
    visits = [Visit(admission.enter(batch=batch), order) for batch in (False, True)]
    with pytest.raises(EngineUnavailable, match="no replica"):
        async with asyncio.timeout(120):
            await visits[0].task
    with pytest.raises(EngineUnavailable):
        await visits[1].task
    with pytest.raises(EngineUnavailable):
        admission.enter()
    assert [admission.waiting(), admission.waiting(batch=True), order] == [0, 0, []]
    capacity = 3
    admission.enter().release()
    for ticket in tickets:
        ticket.release()
    assert admission.inside() == 0


async def test_a_long_swap_is_no_outage() -> None:
    capacity, swapping = 1, True
    admission = Admission(lambda: capacity, swapping=lambda: swapping, outage=0.0)
    first = admission.enter()
    capacity = 0
    order: list[Visit] = []
    visit = Visit(admission.enter(), order)
    await asyncio.sleep(0.3)  # some looks
    assert not visit.task.done()
    capacity, swapping = 1, False
    first.release()
    await let_tasks_run()
    assert order == [visit]
    visit.done.set()
    await visit.task


async def test_a_batch_leaves_a_reserve_and_waits_for_the_others() -> None:
    admission = Admission(16, trickle=1e9)
    assert 16 - admission.reserve == 13
    batch = [admission.enter(batch=True) for _ in range(20)]
    assert admission.inside(batch=True) == 13
    people = [admission.enter("a") for _ in range(5)]
    assert [ticket.inside for ticket in people] == [True] * 3 + [False] * 2
    for ticket in batch[:3]:
        ticket.release()
    assert all(ticket.inside for ticket in people)
    assert admission.inside(batch=True) == 10
    for ticket in people:
        ticket.release()
    assert admission.inside(batch=True) == 13
    for ticket in batch:
        ticket.release()


async def test_a_batch_never_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(
        "cray_agents.runtime.gateway.model_calls.admission.time.monotonic", lambda: now
    )
    admission = Admission(4, 1000, trickle=5.0)
    people = [admission.enter("a") for _ in range(100)]
    batch = [admission.enter(batch=True) for _ in range(3)]
    let_in = []
    for _ in range(12):  # seconds, in each of which one leaves
        now += 1
        next(ticket for ticket in people if ticket.inside).release()
        let_in.append(sum(ticket.inside for ticket in batch))
    assert let_in == [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    assert admission.inside() + admission.inside(batch=True) == 4
    for ticket in (*people, *batch):
        ticket.release()


async def test_who_came_first_gets_a_new_slot_first() -> None:
    capacity = 1
    admission = Admission(lambda: capacity)
    inside, first = admission.enter("a"), admission.enter("a")
    capacity = 2
    second = admission.enter("b")
    assert first.inside and not second.inside
    for ticket in (inside, first, second):
        ticket.release()


async def test_who_waits_for_a_model_that_nobody_holds_takes_no_slot() -> None:
    served = {"old"}
    admission = Admission(2, queue=1, serves=served.__contains__, swapping=lambda: True, outage=30)
    waiting = [admission.enter("a", model="new") for _ in range(5)]  # beyond the bound, too
    assert not any(ticket.inside for ticket in waiting) and admission.waiting() == 5
    candidate = admission.enter("b", model="old")
    assert candidate.inside
    turns = [asyncio.create_task(ticket.wait()) for ticket in waiting]
    await asyncio.sleep(0)
    waiting[4].release()  # its client has left
    served.add("new")
    admission.recheck()
    assert [ticket.inside for ticket in waiting] == [True, False, False, False, False]
    served.remove("new")
    candidate.release()
    waiting[0].release()
    assert admission.inside() == 0 and admission.waiting() == 3, "parked again, in their place"
    served.add("new")
    await asyncio.gather(*turns[1:3])  # noticed without a recheck
    assert admission.inside() == 2
    for ticket in waiting:
        ticket.release()
    await asyncio.gather(*turns, return_exceptions=True)
    assert admission.inside() == admission.waiting() == 0


async def test_who_waits_for_a_model_that_nobody_holds_is_counted() -> None:
    served = {"old"}
    swapping = False
    admission = Admission(1, 4, serves=served.__contains__, swapping=lambda: swapping)
    parked = [admission.enter("a", model="new") for _ in range(4)]
    with pytest.raises(TooManyRequests, match="0 requests are served and 4 wait"):
        admission.enter("a", model="new")
    batch = admission.enter("a", batch=True, model="new")  # bounded by their sender
    parked += [admission.enter("b", model="new") for _ in range(2)]  # within this key's share
    with pytest.raises(TooManyRequests):
        admission.enter("b", model="new")
    rest = [admission.enter("a", model="old") for _ in range(5)]  # not kept out by parked ones
    assert rest[0].inside
    swapping = True
    parked.append(admission.enter("a", model="new"))
    swapping = False
    for ticket in parked[:3]:
        ticket.release()
    more = [admission.enter("a", model="new")]
    with pytest.raises(TooManyRequests):
        admission.enter("a", model="new")
    for ticket in rest:
        ticket.release()
    served.add("new")
    admission.recheck()
    assert parked[3].inside
    served.remove("new")
    parked[3].release()  # the others are parked again, not refused as new requests
    for ticket in (*parked, *more, batch):
        ticket.release()
    assert admission.inside() == admission.waiting() == 0
    assert [admission.enter("a", model="new").inside for _ in range(4)] == [False] * 4


async def test_a_model_that_does_not_come_back_is_not_waited_for_for_ever() -> None:
    admission = Admission(2, serves=lambda model: model == "old", outage=0.2)
    with pytest.raises(EngineUnavailable, match="no replica has served new"):
        await admission.enter(model="new").wait()
    assert admission.waiting() == 0 and admission.enter(model="old").inside


FAILURES = (Corrupt("models/m/1.json is damaged"), OSError(5, "the disk is away"), RuntimeError())


@settings(max_examples=60, deadline=None)
@given(
    says=st.lists(st.sampled_from((True, True, False, *FAILURES)), min_size=1, max_size=12),
    steps=st.lists(st.tuples(st.sampled_from(KEYS), st.booleans()), min_size=1, max_size=20),
)
def test_a_model_that_cannot_be_looked_up_harms_only_its_own_request(
    says: list[bool | Exception], steps: list[tuple[str, bool]]
) -> None:
    """`serves` fails at any of its calls: each request gets a slot or an error, and none is left.

    A request that leaves is never told of another's model.
    """
    answers = iter(says)

    def serves(model: str) -> bool:
        said = next(answers, True)  # in the end all is well
        if isinstance(said, Exception):
            raise said
        return said

    async def visit(admission: Admission, key: str, batch: bool) -> None:
        ticket = admission.enter(key, batch, f"m-{key}")
        try:
            await ticket.wait()
            await asyncio.sleep(0)
        finally:
            ticket.release()
            ticket.release()

    async def play() -> None:
        admission = Admission(1, 100, serves=serves, trickle=0.0)
        visits = [visit(admission, key, batch) for key, batch in steps]
        async with asyncio.timeout(60):
            ends = await asyncio.gather(*visits, return_exceptions=True)
        assert all(end is None or end in FAILURES for end in ends), ends
        assert [admission.inside(b) + admission.waiting(b) for b in (False, True)] == [0, 0]
        assert admission.parked == 0

    asyncio.run(play())


def test_shares_are_as_demands_and_never_more_than_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = GatewayShares()
    shares.note("a", 89)
    shares.note("b", 0)
    assert shares.of("a", 8) == 0.9
    assert shares.own(8) == 0.09
    assert shares.of("a", 8) + shares.of("b", 8) + shares.own(8) == pytest.approx(1.0)
    assert shares.demand == 89
    shares.note("a", 0)
    assert shares.of("a", 0) == shares.of("b", 0) == shares.own(0) == pytest.approx(1 / 3)
    monkeypatch.setattr(admission, "FORGOTTEN", 0.0)
    assert (shares.demand, shares.own(5)) == (0, 1.0)
