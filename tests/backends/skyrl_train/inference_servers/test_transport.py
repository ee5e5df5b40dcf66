import asyncio

import aiohttp
import pytest

from skyrl.backends.skyrl_train.inference_servers.health import ServerHealth
from skyrl.backends.skyrl_train.inference_servers.transport import HttpTransport, RetryPolicy, ServerResponseError
from skyrl.errors import InferenceError
from tests.fakes.http_server import FakeVLLMServer, status


def error(code: int, retryable: bool) -> ServerResponseError:
    return ServerResponseError("http://a", code, "m", retryable=retryable)


def test_busy_answers_wait_longer_each_time_up_to_the_limit():
    policy = RetryPolicy(attempts=6, pause_s=1.0, max_pause_s=5.0)
    assert [policy.wait_after(i, error(503, True)) for i in range(6)] == [1.0, 2.0, 4.0, 5.0, 5.0, None]


def test_other_error_statuses_are_not_retried():
    assert RetryPolicy().wait_after(0, error(400, False)) is None


def test_without_resend_only_refused_connections_are_retried():
    policy = RetryPolicy(resend=False)
    key = aiohttp.client_reqrep.ConnectionKey("h", 1, False, None, None, None, None)
    assert policy.wait_after(0, aiohttp.ClientConnectorError(key, OSError())) == 1.0
    assert policy.wait_after(0, aiohttp.ServerDisconnectedError()) is None
    assert RetryPolicy().wait_after(0, aiohttp.ServerDisconnectedError()) == 1.0


@pytest.mark.parametrize(
    ("code", "json", "text", "message", "retryable"),
    [
        (400, {"error": {"message": "bad"}}, "", "bad", False),
        (400, {"error": "plain"}, "", "plain", False),
        (404, {"detail": "Not Found"}, "", "Not Found", False),
        (422, None, "text only", "text only", False),
        (500, {"error": {"message": "dead"}}, "", "dead", False),
        (500, None, "bad gateway", "bad gateway", True),
        (502, None, "", "Bad Gateway", True),
        (429, {"error": "full"}, "", "full", True),
        (408, None, "", "Request Timeout", True),
    ],
)
async def test_an_error_answer_says_why_and_whether_to_try_again(code, json, text, message, retryable):
    async with FakeVLLMServer().running() as server:
        server.script("/x", status(code, text, json))
        transport = HttpTransport(retry=RetryPolicy(attempts=1))
        with pytest.raises(ServerResponseError) as caught:
            await transport.request("POST", f"{server.url}/x")
        await transport.close()
    assert (caught.value.status, caught.value.message, caught.value.retryable) == (code, message, retryable)


async def test_a_refused_connection_becomes_an_inference_error():
    transport = HttpTransport(retry=RetryPolicy(attempts=2, pause_s=0.0))
    with pytest.raises(InferenceError, match=r"failed 2 time\(s\)"):
        await transport.request("GET", "http://127.0.0.1:9/health")
    await transport.close()


async def test_closing_forgets_the_subscription_to_deaths():
    health = ServerHealth()
    transport = HttpTransport(health=health)
    async with transport.slot():
        assert len(health._listeners) == 1
    await transport.close()
    assert health._listeners == {}


async def test_two_tasks_share_one_session():
    transport = HttpTransport()
    states = await asyncio.gather(transport._state(), transport._state())
    assert states[0] is states[1]
    await transport.close()
