from types import SimpleNamespace

import pytest

from skyrl.backends.skyrl_train.inference_servers.vllm_middleware import SkyRLMiddleware


async def inner(scope, receive, send):
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b"inner"})


async def call(middleware, path, token=None, kind="http"):
    sent = []
    engine = SimpleNamespace(output_processor=SimpleNamespace(get_num_unfinished_requests=lambda: 5))
    headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    await middleware({"type": kind, "path": path, "headers": headers, "app": app}, None, _append(sent))
    return sent


def _append(sent):
    async def send(message):
        sent.append(message)

    return send


@pytest.fixture
def guarded(monkeypatch):
    monkeypatch.setenv("SKYRL_SERVER_ACCESS_TOKEN", "secret")
    return SkyRLMiddleware(inner)


@pytest.mark.parametrize(
    ("path", "token", "status"),
    [
        ("/pause", None, 401),
        ("/pause", "wrong", 401),
        ("/pause", "secret", 299),
        ("/health", None, 299),
        ("/skyrl/v1/queue", None, 401),
        ("/skyrl/v1/queue", "secret", 200),
    ],
)
async def test_every_path_but_health_needs_the_token(guarded, path, token, status):
    assert (await call(guarded, path, token))[0]["status"] == status


async def test_a_websocket_without_the_token_is_closed(guarded):
    assert (await call(guarded, "/v1/realtime", kind="websocket"))[0]["type"] == "websocket.close"


async def test_without_a_token_all_paths_are_open_and_the_queue_is_counted(monkeypatch):
    monkeypatch.delenv("SKYRL_SERVER_ACCESS_TOKEN", raising=False)
    open_one = SkyRLMiddleware(inner)
    assert (await call(open_one, "/pause"))[0]["status"] == 299
    assert (await call(open_one, "/skyrl/v1/queue"))[1]["body"] == b'{"unfinished": 5}'
    assert (await call(open_one, "/x", kind="lifespan"))[0]["status"] == 299
