"""A bucket limits the rate, a semaphore the number at one time."""

import asyncio
import time

import pytest

from skyrl.train.utils.rate_limiter import AsyncRateLimiter, NoOpRateLimiter, RateLimiterConfig, create_rate_limiter


@pytest.mark.parametrize("limits", [{"trajectories_per_second": 0}, {"trajectories_per_second": -1.0}])
def test_a_rate_must_be_positive(limits):
    with pytest.raises(ValueError, match="trajectories_per_second"):
        RateLimiterConfig(**limits)


def test_a_concurrency_must_be_at_least_one():
    with pytest.raises(ValueError, match="max_concurrency=0"):
        RateLimiterConfig(max_concurrency=0)


@pytest.mark.parametrize(
    "config", [None, {}, {"enabled": False, "max_concurrency": 3}, {"enabled": True}, RateLimiterConfig()]
)
def test_nothing_to_limit_gives_the_limiter_that_never_blocks(config):
    assert type(create_rate_limiter(config)) is NoOpRateLimiter


def test_a_mapping_gives_a_limiter_with_its_limits():
    limiter = create_rate_limiter({"enabled": True, "trajectories_per_second": 0.5, "max_concurrency": 2})
    assert isinstance(limiter, AsyncRateLimiter)
    assert (limiter.rate, limiter.max_concurrency) == (0.5, 2)


async def starts(limiter, count):
    began = time.monotonic()
    times = []

    async def one():
        async with limiter:
            times.append(time.monotonic() - began)

    await asyncio.gather(*(one() for _ in range(count)))
    return sorted(times)


async def test_at_two_a_second_two_start_at_once_and_the_third_half_a_second_later():
    first, second, third = await starts(AsyncRateLimiter(rate=2), 3)
    assert first < 0.2 and second < 0.2
    assert 0.45 <= third < 1.0


async def test_below_one_a_second_the_first_still_starts_at_once():
    limiter = AsyncRateLimiter(rate=0.5)
    async with asyncio.timeout(0.5):
        await limiter.acquire()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await limiter.acquire()


async def test_a_waiter_that_gives_up_returns_its_token():
    limiter = AsyncRateLimiter(rate=10)
    for _ in range(10):
        await limiter.acquire()
    for _ in range(5):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await limiter.acquire()
    began = time.monotonic()
    await limiter.acquire()
    assert time.monotonic() - began < 0.4  # 0.1 s; six borrowed tokens would take 0.6 s


async def test_one_slot_lets_one_run_at_a_time():
    limiter, running, most = AsyncRateLimiter(max_concurrency=1), 0, 0

    async def one():
        nonlocal running, most
        async with limiter:
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.005)
            running -= 1

    await asyncio.gather(*(one() for _ in range(4)))
    assert most == 1


async def test_an_exception_in_the_block_frees_the_slot():
    limiter = AsyncRateLimiter(max_concurrency=1)
    with pytest.raises(RuntimeError):
        async with limiter:
            raise RuntimeError
    async with asyncio.timeout(1):
        await limiter.acquire()


def test_one_limiter_serves_one_loop_after_another():
    limiter = AsyncRateLimiter(rate=100, max_concurrency=1)
    for _ in range(2):
        assert len(asyncio.run(starts(limiter, 3))) == 3
