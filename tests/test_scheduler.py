"""What runs in a step: the continuous policy, without a model."""

from __future__ import annotations

import random

import pytest

from engine.kv_cache import PagePool
from engine.request import Request, RequestError, SamplingParams, Status
from engine.scheduler import ContinuousScheduler, Limits


def make(num_pages=100, page_size=4, **limits):
    return ContinuousScheduler(PagePool(num_pages, page_size), Limits(**limits))


def add(scheduler, prompt, output=4, number=0):
    request = Request(number, list(range(prompt)), prompt, SamplingParams(), 0, output, 0.0)
    scheduler.add(request)
    return request


def step(scheduler):
    """One step without a model; returns (request id, start, count, samples) of its chunks."""
    chunks = scheduler.schedule()
    seen = [(c.request.id, c.start, c.count, c.samples) for c in chunks]
    for chunk in chunks:
        assert len(chunk.request.pages) * scheduler.pool.page_size >= chunk.start + chunk.count
    samples = [c.request for c in chunks if c.samples]
    scheduler.record(chunks)
    for request in samples:
        request.tokens.append(0)
        if request.num_output_tokens == request.max_tokens:
            scheduler.remove(request)
    scheduler.check()
    return seen


def test_decodes_then_chunks_then_new_prompts():  # ENG-14
    scheduler = make(token_budget=4)
    add(scheduler, 2, 3, number=0)
    add(scheduler, 9, 2, number=1)
    assert step(scheduler) == [(0, 0, 2, True), (1, 0, 2, False)]
    assert step(scheduler) == [(0, 2, 1, True), (1, 2, 3, False)]
    add(scheduler, 5, 1, number=2)
    assert step(scheduler) == [(0, 3, 1, True), (1, 5, 3, False)]  # request 0 is done
    assert step(scheduler) == [(1, 8, 1, True), (2, 0, 3, False)]
    assert step(scheduler) == [(1, 9, 1, True), (2, 3, 2, True)]
    assert step(scheduler) == []


def test_budget_and_number_of_requests_are_bounds():
    scheduler = make(token_budget=3, max_num_seqs=2)
    for number in range(4):
        add(scheduler, 2, 2, number=number)
    assert step(scheduler) == [(0, 0, 2, True), (1, 0, 1, False)]
    assert step(scheduler) == [(0, 2, 1, True), (1, 1, 1, True)]  # two run, though a token of the budget is left
    assert step(scheduler) == [(1, 2, 1, True), (2, 0, 2, True)]


@pytest.mark.parametrize(("prompt", "output", "pages"), [(32, 1, 8), (29, 4, 8), (1, 32, 8)])
def test_the_last_token_needs_no_slot(prompt, output, pages):
    scheduler = make(num_pages=pages)
    add(scheduler, prompt, output)
    while step(scheduler):
        pass
    assert scheduler.pool.num_free == pages


@pytest.mark.parametrize(("prompt", "output"), [(40, 4), (33, 1), (29, 5), (1, 33)])
def test_what_can_never_fit_is_refused_and_harms_nobody(prompt, output):  # ENG-01
    scheduler = make(num_pages=8)
    with pytest.raises(RequestError, match=r"need \d+ pages of 4 tokens, and the KV cache has 8; shorten the prompt"):
        add(scheduler, prompt, output)
    add(scheduler, 4, 2, number=1)
    assert step(scheduler) == [(1, 0, 4, True)]
    assert step(scheduler) == [(1, 4, 1, True)]
    assert step(scheduler) == []


def test_a_waiting_prompt_gets_its_turn_when_pages_are_free():
    scheduler = make(num_pages=3)
    add(scheduler, 8, 2, number=0)
    add(scheduler, 8, 1, number=1)
    assert step(scheduler) == [(0, 0, 8, True)]
    assert step(scheduler) == [(0, 8, 1, True)]
    assert step(scheduler) == [(1, 0, 8, True)]


def test_who_came_last_is_preempted_and_recomputes_everything():
    scheduler = make(num_pages=4)
    first, second = add(scheduler, 8, 8, number=0), add(scheduler, 8, 5, number=1)
    assert step(scheduler) == [(0, 0, 8, True), (1, 0, 8, True)]
    # Both need a third page; none is free, so the later one gives up its two.
    assert step(scheduler) == [(0, 8, 1, True)]
    assert (second.preemptions, second.status, second.pages, second.computed) == (1, Status.WAITING, [], 0)
    assert second.num_output_tokens == 1
    late = add(scheduler, 1, 1, number=2)
    for _ in range(6):  # there is one page, and the second, who is first in the queue, needs three
        assert [entry[0] for entry in step(scheduler)] == [0]
    assert first.status is Status.FINISHED
    assert step(scheduler) == [(1, 0, 9, True), (2, 0, 1, True)]
    assert late.status is Status.FINISHED
    assert first.preemptions == late.preemptions == 0


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted", "finished", "unknown"])
def test_removal_in_any_state(state):  # ENG-16
    scheduler = make(num_pages=6, token_budget=8)
    other = add(scheduler, 4, 12, number=0)
    step(scheduler)
    target = Request(1, list(range(10)), 10, SamplingParams(), 0, 12, 0.0)
    if state != "unknown":
        scheduler.add(target)
    steps = {"prefill": 1, "decode": 2, "preempted": 20, "finished": 60}.get(state, 0)
    for _ in range(steps):
        if state == "preempted" and target.preemptions:
            break
        step(scheduler)
    if state == "prefill":
        assert 0 < target.computed < 10
    if state == "preempted":
        assert target.preemptions == 1
        assert target.status is Status.WAITING
    scheduler.remove(target)
    scheduler.remove(target)
    scheduler.check()
    assert not target.pages
    while step(scheduler):
        pass
    assert other.num_output_tokens == 12
    assert scheduler.pool.num_free == 6


def test_removal_between_schedule_and_record():  # ENG-16
    scheduler = make()
    request = add(scheduler, 4)
    chunks = scheduler.schedule()
    scheduler.remove(request)
    scheduler.record(chunks)
    assert request.computed == 0
    assert scheduler.pool.num_free == 100


@pytest.mark.parametrize("seed", range(40))
def test_random_loads_end_with_every_page_free(seed):  # ENG-12
    draw = random.Random(seed)
    page_size = draw.choice([1, 2, 4, 7])
    pages = draw.randint(4, 20)
    scheduler = make(pages, page_size, token_budget=draw.randint(1, 12), max_num_seqs=draw.randint(1, 6))
    requests = []
    for _ in range(400):
        if draw.random() < 0.3 and len(requests) < 30:
            prompt, output = draw.randint(1, 20), draw.randint(1, 10)
            if scheduler.pool.pages_for(prompt + output - 1) <= pages:
                requests.append(add(scheduler, prompt, output, number=len(requests)))
        if requests and draw.random() < 0.05:
            scheduler.remove(draw.choice(requests))
        chunks = step(scheduler)
        assert sum(count for _, _, count, _ in chunks) <= scheduler.limits.token_budget
        assert len({number for number, *_ in chunks}) == len(chunks) <= scheduler.limits.max_num_seqs
    bound = 0
    while step(scheduler):
        bound += 1
        assert bound < 5000, "no end in sight"
    assert all(request.status is Status.FINISHED for request in requests)
    assert scheduler.pool.num_free == pages


@pytest.mark.parametrize("field", ["max_num_seqs", "token_budget"])
def test_limits_that_make_no_sense(field):
    with pytest.raises(ValueError, match=f"{field} is 0; it should be at least 1"):
        Limits(**{field: 0})
