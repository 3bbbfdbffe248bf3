"""Pages and their owners."""

from __future__ import annotations

import random

import pytest
import torch

from engine.config import ModelConfig, RopeConfig
from engine.kv_cache import KVCache, PagePool, default_num_pages

CONFIG = ModelConfig("llama", 3, 64, 96, 4, 2, 16, 320, 100, 1e-5, RopeConfig(1e4, 16))


def test_pages_are_handed_out_once():
    pool = PagePool(5, 4)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used, pool.num_slots) == (0, 5, 20)
    pool.check([first, second])


def test_too_many_pages_take_nothing():
    pool = PagePool(3, 4)
    taken = pool.allocate(2)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(0) == []
    pool.check([taken])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_for_tokens(tokens, pages):
    assert PagePool(3, 4).pages_for(tokens) == pages


def test_double_free_and_foreign_pages_are_errors():  # ENG-12
    pool = PagePool(3, 4)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(ValueError, match=f"page {page} is free"):
        pool.release([page])
    with pytest.raises(ValueError, match=f"page {page} is free"):
        pool.share([page])
    for foreign in (-1, 3):
        with pytest.raises(ValueError, match=rf"page is {foreign}; it should be within 0\.\.2"):
            pool.release([foreign])
    pool.check([])


def test_a_shared_page_survives_one_owner():  # ENG-12
    pool = PagePool(2, 4)
    pages = pool.allocate(2)
    pool.share(pages[:1])
    pool.check([pages, pages[:1]])
    pool.release(pages)
    assert pool.num_free == 1
    pool.check([pages[:1]])
    pool.release(pages[:1])
    assert pool.num_free == 2


def test_check_finds_what_is_wrong():
    pool = PagePool(3, 4)
    pages = pool.allocate(2)
    with pytest.raises(AssertionError, match="has count 1 and 0 owners"):
        pool.check([pages[:1]])
    with pytest.raises(AssertionError, match="has count 1 and 2 owners"):
        pool.check([pages, pages])
    pool._free.append(pages[0])
    with pytest.raises(AssertionError, match="free is True"):
        pool.check([pages])


def test_random_use_keeps_the_invariants():  # ENG-12
    draw = random.Random(1)
    pool, owners = PagePool(20, 4), []
    for _ in range(2000):
        action = draw.random()
        if action < 0.5:
            pages = pool.allocate(draw.randint(0, 5))
            if pages is not None:
                owners.append(pages)
        elif owners and action < 0.6:
            shared = list(draw.choice(owners))
            pool.share(shared)
            owners.append(shared)
        elif owners:
            pool.release(owners.pop(draw.randrange(len(owners))))
        pool.check(owners)
    for pages in owners:
        pool.release(pages)
    assert pool.num_free == 20


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0), (-1, 4)])
def test_sizes_that_make_no_sense(num_pages, page_size):
    with pytest.raises(ValueError, match="it should be at least 1"):
        PagePool(num_pages, page_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout(dtype):
    cache = KVCache(CONFIG, 7, 4, dtype)
    assert cache.nbytes == 7 * 4 * CONFIG.kv_bytes_per_token(dtype)
    assert len(cache.layers) == CONFIG.num_layers
    for i, (keys, values) in enumerate(cache.layers):
        assert keys.shape == values.shape == (7, 4, 2, 16)
        assert keys.is_contiguous()
        assert values.is_contiguous()
        keys.fill_(2 * i)
        values.fill_(2 * i + 1)
    # No two layers, and no keys and values, share memory.
    assert [part.unique().tolist() for pair in cache.layers for part in pair] == [[i] for i in range(6)]


def test_default_size():
    per_page = 16 * CONFIG.kv_bytes_per_token(torch.float32)
    assert default_num_pages(CONFIG, 16, torch.float32, 3, 1 << 40) == 3 * 7  # three contexts of 100 tokens
    assert default_num_pages(CONFIG, 16, torch.float32, 3, 10 * per_page) == 5  # half of the memory
    assert default_num_pages(CONFIG, 16, torch.float32, 3, 0) == 1
    assert default_num_pages(CONFIG, 16, torch.float32, 10**9, None) == (1 << 29) // per_page
