import asyncio

import pytest

from skyrl.backends.skyrl_train.inference_servers.health import ServerHealth, answers_health
from skyrl.errors import EngineDiedError
from tests.fakes.http_server import FakeVLLMServer, drop, status


def test_nothing_is_raised_while_all_live():
    ServerHealth().raise_if_dead()


def test_each_death_is_told_once_with_its_first_reason():
    health, told = ServerHealth(), []
    end = health.subscribe(lambda: told.append(1))
    health.mark_dead("http://a", "killed")
    health.mark_dead("http://a", "again")
    end()
    health.mark_dead("http://b", "too")
    assert told == [1]
    with pytest.raises(EngineDiedError, match=r"2 inference.*a: killed; http://b: too"):
        health.raise_if_dead()


async def test_health_is_a_200_and_nothing_else():
    async def garbage(reader, writer):
        writer.write(b"no http at all\r\n\r\n")
        writer.close()

    async with FakeVLLMServer().running() as server:
        server.script("/health", status(200), status(503), drop)
        answers = [await asyncio.to_thread(answers_health, server.url) for _ in range(3)]
        url = server.url
    assert answers == [True, False, False]
    assert not await asyncio.to_thread(answers_health, url)
    async with await asyncio.start_server(garbage, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        assert not await asyncio.to_thread(answers_health, f"http://127.0.0.1:{port}")
