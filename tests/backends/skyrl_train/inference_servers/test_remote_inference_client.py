import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from skyrl import env_vars
from skyrl.backends.skyrl_train.inference_servers import transport
from skyrl.backends.skyrl_train.inference_servers.health import ServerHealth
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import PauseMode, RemoteInferenceClient
from skyrl.backends.skyrl_train.inference_servers.transport import RetryPolicy, ServerResponseError
from skyrl.errors import DeadlineError, EngineDiedError, InferenceError, WeightSyncError
from tests.fakes.http_server import FakeVLLMServer, aborted_after, drop, hang, status

GENERATE = "/inference/v1/generate"
FAST = RetryPolicy(attempts=4, pause_s=0.01, max_pause_s=0.02)


@pytest.fixture
async def server() -> AsyncIterator[FakeVLLMServer]:
    async with FakeVLLMServer().running() as fake:
        yield fake


@pytest.fixture
async def client(server: FakeVLLMServer) -> AsyncIterator[RemoteInferenceClient]:
    async with make_client(server) as made:
        yield made


def make_client(*servers: FakeVLLMServer, **options: Any) -> RemoteInferenceClient:
    urls = [server.url for server in servers]
    options = {"data_parallel_size": 1, "model_name": "base", "retry": FAST} | options
    return RemoteInferenceClient(proxy_url=urls[0], server_urls=urls, **options)


def batch(*prompts: list[int], **extra: Any) -> dict[str, Any]:
    return {"prompt_token_ids": list(prompts), "sampling_params": {"max_tokens": 2, "logprobs": 1}} | extra


class WordTokenizer:
    """Token n is the word ``wn``; 0 is special."""

    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return [" ".join(f"w{i}" for i in one if i or not skip_special_tokens) for one in ids]

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [[0] * add_special_tokens + [int(word[1:]) for word in text.split()] for text in texts]}


# Generation


async def test_responses_keep_the_order_of_the_prompts_whatever_ends_first(server, client):
    server.script(GENERATE, lambda request: _late(server, request))
    output = await client.generate(batch([10], [20], [30]))
    assert output["response_ids"] == [[11, 12], [21, 22], [31, 32]]
    assert output["response_logprobs"] == [[-1.0, -2.0]] * 3
    assert output["stop_reasons"] == ["length"] * 3
    assert "errors" not in output


async def _late(server, request):
    await asyncio.sleep(0.05)
    return server._answer(GENERATE, await request.json())


async def test_the_wire_carries_tokens_parameters_model_salt_priority_and_session(server, client):
    await client.generate(batch([1, 2], [3], session_ids=["s1"], cache_salt="7", priorities=[5, 6]), model="adapter")
    first, second = sorted(server.requests(GENERATE), key=lambda one: one.body["priority"])
    assert first.body == {
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": 2, "logprobs": 0, "output_kind": 2},
        "model": "adapter",
        "cache_salt": "7",
        "priority": 5,
    }
    assert first.headers["X-Session-ID"] == "s1"
    assert "X-Session-ID" not in second.headers
    assert first.headers["X-Request-Id"] != second.headers["X-Request-Id"]


async def test_each_prompt_may_have_its_own_parameters(server, client):
    output = await client.generate(
        {"prompt_token_ids": [[1], [2]], "sampling_params": [{"max_tokens": 1}, {"max_tokens": 4}]}
    )
    assert [len(ids) for ids in output["response_ids"]] == [1, 4]
    assert output["response_logprobs"] is None


async def test_text_is_decoded_by_the_tokenizer_where_there_is_one(server):
    async with make_client(server, tokenizer=WordTokenizer()) as client:
        output = await client.generate(batch([4]))
        assert output["responses"] == ["w5 w6"]
        assert await client.tokenize(["w3 w4"], add_special_tokens=False) == [[3, 4]]
        assert await client.detokenize([[0, 9]], skip_special_tokens=True) == ["w9"]
    assert [one.path for one in server.seen] == [GENERATE]


async def test_without_a_tokenizer_the_server_makes_text(server, client):
    assert await client.tokenize(["a", "b"]) == [[1, 2], [1, 2]]
    assert await client.detokenize([[1]]) == ["text"]
    assert server.requests("/tokenize")[0].body == {"model": "base", "prompt": "a", "add_special_tokens": True}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"prompts": [[{"role": "user", "content": "hi"}]]}, "prompt_token_ids only"),
        ({}, "prompt_token_ids is missing"),
        (batch([1], sampling_params={"n": 2}), "n=2"),
        (batch([1], sampling_params={"temprature": 1.0}), "temperature"),
        (batch([1], sampling_params=[{}, {}]), "2 entries for 1 prompts"),
        (batch([1], priorities=[1, 2]), "2 entries for 1 prompts"),
    ],
)
async def test_bad_input_is_refused_before_anything_is_sent(server, client, given, text):
    with pytest.raises(ValueError, match=text):
        await client.generate(given)
    assert server.seen == []


async def test_missing_and_not_finite_logprobs_become_the_floor_and_are_counted(server, client):
    body = {
        "choices": [
            {
                "token_ids": [1, 2, 3],
                "finish_reason": "stop",
                "logprobs": {"content": [{"logprob": None}, {"logprob": -0.5}]},
            }
        ]
    }
    server.script(GENERATE, status(200, json=body))
    output = await client.generate(batch([1]))
    assert output["response_logprobs"] == [[-9999.0, -0.5, -9999.0]]
    assert output["num_clamped_logprobs"] == [2]


async def test_prompt_logprobs_are_those_of_the_prompts_own_tokens(server, client):
    body = {
        "choices": [{"token_ids": [9], "finish_reason": "stop"}],
        "prompt_logprobs": [None, {"6": {"logprob": -0.25}, "7": {"logprob": -3.0}}],
    }
    server.script(GENERATE, status(200, json=body))
    output = await client.generate(batch([5, 6], sampling_params={"prompt_logprobs": 1}))
    assert output["prompt_logprobs"] == [[None, -0.25]]


async def test_in_flight_requests_are_limited_per_server(server, monkeypatch):
    monkeypatch.setattr(env_vars, "SKYRL_GENERATE_CONCURRENCY_PER_ENGINE", 3)
    server.delay_s = 0.02
    async with make_client(server) as client:
        await asyncio.gather(client.generate(batch(*[[i] for i in range(8)])), client.generate(batch([1], [2])))
    assert server.most_in_flight == 3


# Failures


async def test_lost_connections_and_busy_servers_are_tried_again_under_new_request_ids(server, client):
    server.script(GENERATE, drop, status(503, json={"error": "warming up"}), status(500, "router: no worker"))
    output = await client.generate(batch([1]))
    assert output["response_ids"] == [[2, 3]]
    ids = [one.headers["X-Request-Id"] for one in server.requests(GENERATE)]
    assert len(set(ids)) == 4
    assert server.requests("/abort_requests")[0].body == {"request_ids": [f"generate-tokens-{one}" for one in ids[:3]]}


@pytest.mark.parametrize("code", [408, 429, 503])
async def test_busy_statuses_are_retried_with_and_without_json(server, client, code):
    server.script(GENERATE, status(code), status(code, json={"error": {"message": "full"}}))
    assert (await client.generate(batch([1])))["response_ids"] == [[2, 3]]


async def test_an_error_with_a_json_body_is_raised_at_once_with_its_message(server, client):
    server.script(GENERATE, status(500, json={"error": {"message": "engine broke", "code": 500}}))
    with pytest.raises(InferenceError, match="engine broke") as caught:
        await client.generate(batch([1]))
    assert isinstance(caught.value, aiohttp.ClientResponseError)
    assert caught.value.status == 500
    assert len(server.requests(GENERATE)) == 1


async def test_a_client_error_without_json_is_raised_at_once_with_its_text(server, client):
    server.script("/v1/completions", status(422, "token_ids is missing"))
    with pytest.raises(ServerResponseError, match="token_ids is missing"):
        await client.completion({"json": {"prompt": "x"}})
    assert len(server.requests("/v1/completions")) == 1


async def test_after_the_last_try_the_error_says_how_often(server, client):
    server.script(GENERATE, drop, drop, drop, drop)
    with pytest.raises(InferenceError, match=r"failed 4 time\(s\)"):
        await client.generate(batch([1]))


async def test_one_failing_prompt_does_not_take_the_batch_along(server, client):
    server.script(GENERATE, status(400, json={"error": {"message": "prompt too long"}}))
    output = await client.generate(batch([1], [10]))
    failed = output["stop_reasons"].index("error")
    assert sorted(output["stop_reasons"]) == ["error", "length"]
    assert output["response_ids"][failed] == []
    assert output["response_logprobs"][failed] == []
    assert "prompt too long" in output["errors"][failed]
    assert output["errors"][1 - failed] is None


async def test_a_batch_of_failures_raises(server, client):
    server.script(GENERATE, *[status(404, json={"error": {"message": "no such model"}})] * 2)
    with pytest.raises(InferenceError, match=r"all 2 generation requests failed.*no such model"):
        await client.generate(batch([1], [2]))


async def test_a_death_ends_requests_in_flight_at_once(server):
    health = ServerHealth()
    server.script(GENERATE, hang(), hang())
    async with make_client(server, health=health) as client:
        task = asyncio.create_task(client.generate(batch([1], [2])))
        while len(server.requests(GENERATE)) < 2:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(health.mark_dead, server.url, "out of memory")
        with pytest.raises(EngineDiedError, match="out of memory"):
            await asyncio.wait_for(task, 1)
        with pytest.raises(EngineDiedError, match="out of memory"):
            await client.chat_completion({"json": {}})
        with pytest.raises(InferenceError, match="out of memory"):
            await client.resume()


async def test_a_dead_engine_that_still_answers_is_told_once_its_server_ends(server):
    health = ServerHealth()
    server.script(GENERATE, status(500, json={"error": {"message": "EngineCore encountered an issue"}}))
    async with make_client(server, health=health) as client:
        task = asyncio.create_task(client.generate(batch([1], [2])))
        await asyncio.sleep(0.2)
        health.mark_dead(server.url, "out of memory")
        with pytest.raises(EngineDiedError, match="out of memory"):
            await asyncio.wait_for(task, 1)


async def test_a_server_error_without_a_death_fails_its_prompt_only(server, monkeypatch):
    monkeypatch.setattr(transport, "DEATH_NOTICE_S", 0.1)
    server.script(GENERATE, status(500, json={"error": {"message": "odd"}}))
    async with make_client(server, health=ServerHealth()) as client:
        output = await client.generate(batch([1], [2]))
    assert sorted(output["stop_reasons"]) == ["error", "length"]


@pytest.mark.parametrize(
    ("path", "call"),
    [
        ("/v1/chat/completions", lambda client: client.chat_completion({"json": {}})),
        ("/v1/completions", lambda client: client.completion({"json": {}})),
        ("/tokenize", lambda client: client.tokenize(["a"])),
        ("/detokenize", lambda client: client.detokenize([[1]])),
        (GENERATE, lambda client: client.generate(batch([1]))),
    ],
)
async def test_every_call_of_the_data_plane_has_a_deadline(server, path, call):
    server.script(path, hang())
    async with make_client(server, trajectory_timeout_s=0.05) as client:
        with pytest.raises(DeadlineError, match=rf"{path} .*trajectory_timeout_s=0\.05"):
            await asyncio.wait_for(call(client), 5)


async def test_a_request_that_hangs_does_not_take_the_batch_along(server):
    server.script(GENERATE, hang())
    async with make_client(server, trajectory_timeout_s=0.3) as client:
        output = await client.generate(batch([1], [2]))
    assert sorted(output["stop_reasons"]) == ["error", "length"]
    assert any("trajectory_timeout_s" in (error or "") for error in output["errors"])


# Aborted requests


async def test_an_aborted_request_goes_on_from_its_partial_tokens(server, client):
    server.script(GENERATE, aborted_after(2), aborted_after(0))
    params = {"max_tokens": 5, "min_tokens": 3, "seed": 8, "logprobs": 0}
    output = await client.generate(batch([10], sampling_params=params))
    assert output["response_ids"] == [[11, 12, 13, 14, 15]]
    assert output["response_logprobs"] == [[-1.0, -2.0, -1.0, -2.0, -3.0]]
    assert output["stop_reasons"] == ["length"]
    bodies = [one.body for one in server.requests(GENERATE)]
    assert bodies[1]["token_ids"] == [10, 11, 12]
    assert bodies[1]["sampling_params"] | {"output_kind": 2} == {
        "max_tokens": 3, "min_tokens": 1, "seed": 9, "logprobs": 0, "output_kind": 2,
    }  # fmt: skip


async def test_an_abort_at_the_last_token_is_a_full_response(server, client):
    server.script(GENERATE, aborted_after(2))
    output = await client.generate(batch([10]))
    assert output["response_ids"] == [[11, 12]]
    assert output["response_logprobs"] == [[-1.0, -2.0]]
    assert output["stop_reasons"] == ["length"]
    assert len(server.requests(GENERATE)) == 1


async def test_without_retry_on_abort_the_partial_response_comes_back(server):
    server.script(GENERATE, aborted_after(1))
    async with make_client(server, retry_on_abort=False) as client:
        output = await client.generate(batch([10]))
    assert output["stop_reasons"] == ["abort"]
    assert output["response_ids"] == [[11]]


async def test_an_engine_that_only_aborts_is_given_up(server, client):
    server.script(GENERATE, *[aborted_after(0)] * 10)
    with pytest.raises(InferenceError, match="aborted a request 4 times"):
        await client.generate(batch([10]))


# Chat


@pytest.mark.parametrize(
    ("call", "path"),
    [
        ("chat_completion", "/v1/chat/completions"),
        ("completion", "/v1/completions"),
        ("render_chat_completion", "/v1/chat/completions/render"),
    ],
)
async def test_payload_methods_fill_the_model_and_move_the_session_to_the_header(server, client, call, path):
    payload = {"json": {"session_id": "s9", "messages": []}, "headers": {"X-Extra": "1"}}
    answer = await getattr(client, call)(payload)
    assert answer["body"] == {"messages": [], "model": "base"}
    (seen,) = server.requests(path)
    assert (seen.headers["X-Session-ID"], seen.headers["X-Extra"]) == ("s9", "1")
    assert payload == {"json": {"session_id": "s9", "messages": []}, "headers": {"X-Extra": "1"}}
    await getattr(client, call)({"json": {"model": "other"}})
    assert server.requests(path)[1].body["model"] == "other"
    assert "X-Session-ID" not in server.requests(path)[1].headers


# Sessions


async def test_finish_session_names_the_session_in_the_query(server, client):
    await client.finish_session("a b")
    assert server.requests("/finish_session")[0].query == {"session_id": ["a b"]}


@pytest.mark.parametrize("session", [None, ""])
async def test_finish_session_without_a_session_does_nothing(server, client, session):
    await client.finish_session(session)
    assert server.seen == []


async def test_finish_session_never_raises(server, client):
    server.script("/finish_session", status(500, "broken"), drop)
    await client.finish_session("a")
    await client.finish_session("a")
    gone = RemoteInferenceClient(proxy_url="http://127.0.0.1:9", server_urls=["x"], data_parallel_size=1)
    await gone.finish_session("a")
    await gone.aclose()


async def test_a_server_without_sessions_is_asked_once(server, client):
    server.script("/finish_session", status(404, json={"detail": "Not Found"}))
    await client.finish_session("a")
    await client.finish_session("b")
    assert len(server.requests("/finish_session")) == 1


# Control plane


async def test_control_calls_reach_every_server(server, client):
    async with FakeVLLMServer().running() as other, make_client(server, other) as both:
        answer = await both.pause("ABORT", clear_cache=True)
        assert answer == {one.url: {"status": 200, "body": {"status": "paused"}} for one in (server, other)}
        assert other.requests("/pause")[0].query == {"mode": ["abort"], "clear_cache": ["true"]}
        await both.pause_generation()
        assert other.requests("/pause")[1].query == {"mode": ["keep"], "clear_cache": ["false"]}
        assert await both.is_paused() == {server.url: True, other.url: True}
        await both.resume_generation()
        assert not server.paused
        await both.sleep(level=1, tags=["weights"])
        assert other.requests("/sleep")[0].query == {"level": ["1"], "tags": ["weights"]}
        await both.wake_up(tags=["weights", "kv_cache"])
        assert other.requests("/wake_up")[0].query == {"tags": ["weights", "kv_cache"]}
        assert await both.collective_rpc("who", args=[1], kwargs={"a": 2}, timeout_s=3.0) == {
            server.url: [{"rank": 0}],
            other.url: [{"rank": 0}],
        }
        assert other.requests("/collective_rpc")[0].body == {
            "method": "who", "args": [1], "kwargs": {"a": 2}, "timeout": 3.0,
        }  # fmt: skip


async def test_pause_mode_accepts_any_case_and_refuses_other_words(client):
    await client.pause(PauseMode.WAIT)
    with pytest.raises(ValueError, match="freeze"):
        await client.pause("freeze")


async def test_a_failed_pause_resumes_the_others_and_names_who_failed(server):
    async with FakeVLLMServer().running() as broken, make_client(server, broken) as both:
        broken.script("/pause", status(500, json={"error": "cannot"}))
        with pytest.raises(InferenceError, match="1 of 2") as caught:
            await both.pause()
        assert list(caught.value.failures) == [broken.url]
        assert not server.paused
        assert broken.requests("/resume") == []


async def test_a_fan_out_waits_for_all_servers_before_it_raises(server):
    async with FakeVLLMServer(delay_s=0.1).running() as slow, make_client(server, slow) as both:
        server.script("/finish_weight_update", status(500, json={"error": {"message": "no update"}}))
        with pytest.raises(InferenceError, match="no update"):
            await both.finish_weight_update()
        assert slow.in_flight == 0
        assert pickle.loads(pickle.dumps(_caught(both))).num_servers == 2


def _caught(client):
    from skyrl.backends.skyrl_train.inference_servers.control_plane import FanOutError

    return FanOutError("/x", {"u": ServerResponseError("u", 500, "m")}, 2)


async def test_a_control_call_has_a_deadline(server):
    server.script("/resume", hang())
    async with make_client(server, control_timeout_s=0.05) as client:
        with pytest.raises(DeadlineError, match=r"control_timeout_s=0\.05"):
            await client.resume()


async def test_a_control_call_that_may_have_taken_effect_is_not_sent_twice(server, client):
    server.script("/start_weight_update", drop)
    server.paused = True
    with pytest.raises(InferenceError):
        await client.start_weight_update()
    assert len(server.requests("/start_weight_update")) == 1


async def test_weights_may_only_change_while_paused(server, client):
    with pytest.raises(WeightSyncError, match=server.url):
        await client.start_weight_update()
    await client.pause()
    await client.start_weight_update()
    await client.update_named_weights({"names": ["w"]})
    await client.finish_weight_update()
    assert server.requests("/update_weights")[0].body == {"update_info": {"names": ["w"]}}


async def test_a_prefix_cache_that_could_not_be_reset_is_an_error(server, client):
    await client.reset_prefix_cache(reset_running_requests=True)
    assert server.requests("/reset_prefix_cache")[0].query == {"reset_running_requests": ["true"]}
    server.script("/reset_prefix_cache", status(200, json={"success": False}))
    with pytest.raises(InferenceError, match="could not be reset"):
        await client.reset_prefix_cache()


async def test_each_server_gets_its_own_init_info(server):
    class Info:
        def __init__(self, rank: int = 0) -> None:
            self.rank = rank

        def for_servers(self, per_server, n_servers, dp_size):
            assert (per_server, n_servers, dp_size) == (2, 2, 1)
            return [Info(1), Info(3)]

        def to_api_payload(self):
            return {"rank_offset": self.rank}

    server.world_size = 2
    async with FakeVLLMServer(world_size=2).running() as other, make_client(server, other) as both:
        await both.init_weight_update_communicator(Info())
        bodies = [one.requests("/init_weight_transfer_engine")[0].body for one in (server, other)]
    assert bodies == [{"init_info": {"rank_offset": 1}}, {"init_info": {"rank_offset": 3}}]


async def test_world_size_is_asked_once_and_counts_an_engine_once(server):
    server.world_size = 4  # tensor 2 x data 2, reported by each of the two ranks
    async with FakeVLLMServer(world_size=4).running() as rank1:
        async with make_client(server, rank1, data_parallel_size=2) as client:
            assert await client.get_world_size() == (4, 4)
            assert await client.get_world_size() == (4, 4)
        assert len(server.requests("/get_world_size")) == 1
        async with make_client(server, rank1, data_parallel_size=1) as client:
            assert await client.get_world_size() == (8, 4)


async def test_servers_of_different_size_are_refused(server):
    async with FakeVLLMServer(world_size=2).running() as other, make_client(server, other) as both:
        with pytest.raises(InferenceError, match="differ in world size"):
            await both.get_world_size()


async def test_waiting_for_the_queue_sums_the_servers(server):
    async with FakeVLLMServer().running() as other, make_client(server, other) as both:
        assert await both.wait_until_queued(4, timeout_s=1) == 4
        with pytest.raises(DeadlineError, match="5 queued requests, 4 have come"):
            await both.wait_until_queued(5, timeout_s=0.05)


async def test_the_access_token_goes_with_every_request(server):
    async with make_client(server, access_token="secret") as client:
        await client.resume()
        await client.generate(batch([1]))
    assert {one.headers["Authorization"] for one in server.seen} == {"Bearer secret"}


# The object itself


def test_a_pickled_copy_keeps_the_version_and_drops_connections():
    client = RemoteInferenceClient(
        proxy_url="http://a/", server_urls=["http://a", "http://b"], data_parallel_size=2, health=ServerHealth()
    )
    assert client.increment_weight_version() == 1
    client._http()
    copy = pickle.loads(pickle.dumps(client))
    assert copy.weight_version == 1
    assert copy._transport is None
    assert copy.health is None
    assert copy == client
    assert copy.proxy_url == "http://a"


def test_one_client_serves_several_event_loops_one_after_the_other():
    async def one_loop(client: RemoteInferenceClient, fake: FakeVLLMServer) -> None:
        async with fake.running():
            client.proxy_url, client.server_urls = fake.url, [fake.url]
            assert (await client.generate(batch([1])))["response_ids"] == [[2, 3]]
            await client.aclose()

    client = RemoteInferenceClient(proxy_url="x", server_urls=["x"], data_parallel_size=1)
    asyncio.run(one_loop(client, FakeVLLMServer()))
    asyncio.run(one_loop(client, FakeVLLMServer()))


def test_a_session_of_a_dead_loop_is_replaced():
    client = RemoteInferenceClient(proxy_url="http://127.0.0.1:9", server_urls=["x"], data_parallel_size=1)
    sessions = []

    async def use() -> None:
        sessions.append((await client._http()._state()).session)

    asyncio.run(use())
    asyncio.run(use())
    assert sessions[0] is not sessions[1]
    assert sessions[0].closed
    asyncio.run(client.aclose())
    assert sessions[1].closed


@pytest.mark.parametrize(("urls", "dp"), [(["a"], 0), (["a", "b", "c"], 2), ([], 1)])
def test_servers_must_form_whole_engines(urls, dp):
    with pytest.raises(ValueError, match="data_parallel_size"):
        RemoteInferenceClient(proxy_url="p", server_urls=urls, data_parallel_size=dp)
