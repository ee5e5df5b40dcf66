"""The real engine on the CPU: what the client gets from it, and that it repeats itself."""

import asyncio
import http.client
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.errors import InferenceError, WeightSyncError
from tests.fakes.vllm_server import MAX_BATCHED_TOKENS, SharedServer, push_start_weights

pytestmark = pytest.mark.vllm


@pytest.fixture
async def client(vllm_server: SharedServer) -> AsyncIterator[RemoteInferenceClient]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(vllm_server.model_dir)
    async with vllm_server.make_client(tokenizer=tokenizer) as made:
        await made.reset_prefix_cache(reset_running_requests=True)
        yield made


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(4, 128) for _ in range(length)] for _ in range(count)]


def seeded(count: int, **params: Any) -> list[dict[str, Any]]:
    return [{"max_tokens": 12, "min_tokens": 12, "logprobs": 1, "seed": i} | params for i in range(count)]


async def test_logprobs_are_those_of_the_model_at_the_sampling_temperature(client, vllm_server):
    from transformers import AutoModelForCausalLM

    await push_start_weights(vllm_server)
    given = prompts(8, 15)
    output = await client.generate(
        {"prompt_token_ids": given, "sampling_params": seeded(8, temperature=0.7, min_tokens=0, ignore_eos=True)}
    )
    model = AutoModelForCausalLM.from_pretrained(vllm_server.model_dir, dtype=torch.float32)
    for prompt, ids, logprobs, text in zip(
        given, output["response_ids"], output["response_logprobs"], output["responses"], strict=True
    ):
        assert len(ids) == len(logprobs) == 12
        assert text == client.tokenizer.decode(ids, skip_special_tokens=True)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1)[torch.arange(12), torch.tensor(ids)]
        assert torch.allclose(torch.tensor(logprobs), expected, atol=1e-4)
    assert output["stop_reasons"] == ["length"] * 8


async def test_the_whole_batch_queues_while_paused_and_then_repeats_bit_for_bit(client):
    given, params = prompts(48, 40), seeded(48)

    async def run(order: list[int]) -> dict[int, tuple[list[int], list[float]]]:
        await client.reset_prefix_cache()
        await client.pause_generation()
        batch = {
            "prompt_token_ids": [given[i] for i in order],
            "sampling_params": [params[i] for i in order],
            "priorities": order,
        }
        task = asyncio.create_task(client.generate(batch))
        assert await client.wait_until_queued(48, timeout_s=30) == 48
        await client.resume_generation()
        output = await task
        assert output["response_logprobs"] is not None
        rows = zip(output["response_ids"], output["response_logprobs"], strict=True)
        return dict(zip(order, rows, strict=True))

    in_order = list(range(48))
    shuffled = random.Random(1).sample(in_order, 48)
    first = await run(in_order)
    assert await run(in_order) == first
    assert await run(shuffled) == first


async def test_a_seed_survives_chunked_prefill(client):
    length = MAX_BATCHED_TOKENS // 10 - 3
    given, params = prompts(32, length, seed=2), seeded(32)
    together = await client.generate({"prompt_token_ids": given, "sampling_params": params})
    assert together.get("errors") is None
    for i in (10, 21, 31):  # prompts that straddled the limit of one engine step
        alone = await client.generate({"prompt_token_ids": [given[i]], "sampling_params": params[i]})
        assert alone["response_ids"] == [together["response_ids"][i]]


async def test_a_kept_request_goes_on_where_it_stopped(client):
    batch = {"prompt_token_ids": prompts(1, 8), "sampling_params": seeded(1, max_tokens=300, min_tokens=300)}
    straight = await client.generate(batch)
    await client.reset_prefix_cache()
    task = asyncio.create_task(client.generate(batch))
    await asyncio.sleep(0.1)
    await client.pause_generation()
    assert list((await client.is_paused()).values()) == [True]
    assert await client.wait_until_queued(1, timeout_s=5) == 1
    assert not task.done()
    done, _ = await asyncio.wait([task], timeout=0.3)
    assert not done
    await client.resume_generation()
    assert (await task)["response_ids"] == straight["response_ids"]


async def test_an_aborted_request_is_finished_all_the_same(client):
    batch = {"prompt_token_ids": prompts(4, 8), "sampling_params": seeded(4, max_tokens=300, min_tokens=300)}
    task = asyncio.create_task(client.generate(batch))
    await asyncio.sleep(0.15)
    await client.pause("abort")
    await client.resume()
    output = await task
    assert output["stop_reasons"] == ["length"] * 4
    assert [len(ids) for ids in output["response_ids"]] == [300] * 4
    assert [len(row) for row in output["response_logprobs"]] == [300] * 4


async def test_a_cancelled_caller_leaves_no_request_in_the_engine(client):
    batch = {"prompt_token_ids": prompts(2, 8), "sampling_params": seeded(2, max_tokens=400, min_tokens=400)}
    await client.pause_generation()
    task = asyncio.create_task(client.generate(batch))
    await client.wait_until_queued(2, timeout_s=10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.resume_generation()
    deadline = time.monotonic() + 5
    while await client.wait_until_queued(0, timeout_s=5) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert await client.wait_until_queued(0, timeout_s=5) == 0


async def test_openai_routes_and_tokens_on_the_server(client, vllm_server):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0.0}
    chat = await client.chat_completion({"json": body | {"session_id": "s"}})
    assert chat["usage"]["completion_tokens"] <= 3
    rendered = await client.render_chat_completion({"json": body})
    template = client.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
    assert rendered["token_ids"] == template
    text = await client.completion({"json": {"prompt": "abc", "max_tokens": 2}})
    assert text["choices"][0]["finish_reason"] in {"length", "stop"}
    async with vllm_server.make_client() as bare:
        assert await bare.tokenize(["abc"]) == await client.tokenize(["abc"])
        assert await bare.detokenize([[40, 41]]) == await client.detokenize([[40, 41]])


async def test_a_prompt_that_is_too_long_and_a_wrong_model_are_clear_errors(client):
    with pytest.raises(InferenceError, match="512"):
        await client.generate({"prompt_token_ids": [[5] * 600], "sampling_params": {"max_tokens": 1}})
    with pytest.raises(InferenceError, match="nobody"):
        await client.generate({"prompt_token_ids": [[5]], "sampling_params": {"max_tokens": 1}}, model="nobody")


async def test_weights_need_a_pause_and_workers_answer_calls(client):
    assert await client.get_world_size() == (1, 1)
    with pytest.raises(WeightSyncError):
        await client.start_weight_update()
    (info,) = (await client.collective_rpc("skyrl_worker_info")).values()
    assert info[0]["device"] == "cpu"
    with pytest.raises(InferenceError, match="nonsense"):
        await client.collective_rpc("nonsense")


def test_nothing_listens_outside_of_the_loopback_and_starting_was_quick(vllm_server):
    host, port = vllm_server.url.removeprefix("http://").split(":")
    assert host == "127.0.0.1"
    connection = http.client.HTTPConnection(host, int(port), timeout=5)
    connection.request("GET", "/docs")
    assert connection.getresponse().status == 404
    connection.close()
    assert vllm_server.start_s < 90
