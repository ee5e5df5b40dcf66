"""What becomes of rollouts that fail, hang or are cancelled, and the deterministic start."""

import asyncio
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.config.generator import RateLimitConfig
from skyrl.errors import ConfigError, DeadlineError, EngineDiedError, InferenceError, RolloutError
from skyrl.train.generators.output_checks import validate_generator_output
from tests.fakes.environments import AsyncScriptedEnv, EnvScript, ScriptedEnv, registered
from tests.fakes.generators import make_batch, make_generator, roll_out
from tests.fakes.inference_engine import FakeInferenceEngine, Reply, script_of
from tests.fakes.tokenizers import make_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_byte_tokenizer()


@pytest.fixture
def engine(tokenizer):
    return FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer)


def fail_when(condition, error):
    def on_step(env, action):
        if condition(env):
            raise error

    return on_step


def repetition(env):
    return env.extras["row"]


def rows(number):
    return make_batch(number, env_extras=[{"row": row} for row in range(number)])


def test_a_failed_rollout_is_a_masked_row_and_the_others_go_on(tokenizer, engine):
    script = EnvScript(on_step=fail_when(lambda env: repetition(env) == 1, ValueError("boom")))
    output = roll_out(make_generator(engine, tokenizer), script, rows(3))
    assert output["stop_reasons"] == ["stop", "error", "stop"]
    assert (output["response_ids"][1], output["loss_masks"][1], output["rewards"][1]) == ([0], [0], [0.0])
    assert output["prompt_token_ids"][1] == output["prompt_token_ids"][0]
    rollout = output["rollouts"][1]
    assert (rollout.failure.type, rollout.failure.message, rollout.failure.where) == ("ValueError", "boom", "env.step")
    assert rollout.attempt == 2 and len(rollout.turns) == 1
    metrics = output["rollout_metrics"]
    assert (metrics["generate/num_failed"], metrics["generate/num_env_errors"]) == (1, 1)
    assert metrics["generate/avg_num_tokens"] == 2  # failed rows are no samples
    assert script.num_open == 0 and engine.open_sessions == set()
    validate_generator_output(3, output)


def test_a_second_try_gets_a_fresh_environment_and_session(tokenizer, engine):
    broken = []

    def fail_once(env, action):
        if not broken:
            broken.append(env)
            raise OSError("flaky")

    script = EnvScript(on_step=fail_once)
    output = roll_out(make_generator(engine, tokenizer), script)
    assert output["stop_reasons"] == ["stop"] and output["rollouts"][0].attempt == 2
    assert output["rollouts"][0].failure is None
    assert len(script.made) == 2 and script.num_open == 0
    assert [call.session for call in engine.calls] == ["p_0", "p_0_try2"]
    assert sorted(engine.finished_sessions) == ["p_0", "p_0_try2"]
    assert output["rollout_metrics"]["generate/num_retried"] == 1


def test_too_many_failures_end_the_batch_with_counted_causes(tokenizer, engine):
    script = EnvScript(on_step=fail_when(lambda env: repetition(env) % 2 == 0, ValueError("boom")))
    generator = make_generator(engine, tokenizer, max_failed_fraction=0.4)
    with pytest.raises(
        RolloutError, match=r"of 4 rollouts failed.*max_failed_fraction=0\.4.*2 x env\.step: ValueError: boom"
    ):
        roll_out(generator, script, rows(4))
    assert script.num_open == 0 and engine.open_sessions == set()


def test_failures_up_to_the_share_are_borne(tokenizer, engine):
    script = EnvScript(on_step=fail_when(lambda env: repetition(env) % 2 == 0, ValueError("boom")))
    output = roll_out(make_generator(engine, tokenizer, max_failed_fraction=0.5), script, rows(4))
    assert output["rollout_metrics"]["generate/num_failed"] == 2


def test_raise_ends_the_batch_and_cleans_up(tokenizer):
    engine = FakeInferenceEngine(lambda call: Reply([5, 2], text="x", delay_s=0.0 if call.session == "p_1" else 5.0))
    script = EnvScript(on_step=fail_when(lambda env: True, ValueError("boom")))
    generator = make_generator(engine, tokenizer, on_error="raise", max_attempts=1)
    began = time.monotonic()
    with pytest.raises(RolloutError, match=r"rollout 1 failed in env\.step at try 1: ValueError: boom") as caught:
        roll_out(generator, script, rows(3))
    assert isinstance(caught.value.__cause__, ValueError)
    assert time.monotonic() - began < 3
    assert script.num_open == 0 and engine.open_sessions == set() and engine.running == 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("nonsense", "returned 'nonsense'; it must return a BaseTextEnvStepOutput"),
        ({"observations": []}, "returned no reward and no done"),
        ({"observations": [], "reward": "much", "done": True}, "the reward 'much', not a number"),
        ({"observations": [], "reward": float("nan"), "done": True}, "the reward nan"),
        ({"observations": ["text"], "reward": 1, "done": True}, "must be a list of"),
        ({"observations": [], "reward": 1, "done": True, "postprocessed_action": 3}, "postprocessed_action 3"),
    ],
)
def test_an_environment_that_answers_nonsense_fails_the_rollout(tokenizer, engine, answer, message):
    output = roll_out(make_generator(engine, tokenizer), EnvScript(on_step=lambda env, action: answer))
    assert output["stop_reasons"] == ["error"]
    assert message in output["rollouts"][0].failure.message


def test_a_missing_dataset_field_and_an_unknown_environment_fail_the_rollout(tokenizer, engine):
    output = roll_out(make_generator(engine, tokenizer), EnvScript(), make_batch(2, env_classes=["gsm8k", "nope"]))
    first, second = (rollout.failure for rollout in output["rollouts"])
    assert (first.where, first.type) == ("env.make", "AssertionError") and "reward_spec" in first.message
    assert (second.where, second.type) == ("env.make", "Error") and "'nope' is not registered" in second.message


def test_a_prompt_that_cannot_be_rendered_still_gives_a_valid_row(tokenizer, engine):
    def strange(env, prompt):
        raise KeyError("column")

    output = roll_out(make_generator(engine, tokenizer), EnvScript(on_init=strange))
    validate_generator_output(1, output)
    assert output["prompt_token_ids"] == [[0]]
    assert output["rollouts"][0].failure.where == "env.init"
    assert output["weight_versions"] == [(0, 0)]


def test_an_engine_that_fails_is_recorded(tokenizer):
    engine = FakeInferenceEngine(lambda call: Reply([], error=InferenceError("server died")), tokenizer)
    output = roll_out(make_generator(engine, tokenizer), EnvScript())
    assert output["rollouts"][0].failure.where == "engine" and "server died" in output["rollouts"][0].failure.message
    assert len(engine.finished_sessions) == 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_server_that_dies_ends_the_batch_at_once_and_cleans_up(tokenizer, deterministic):
    def reply(call):
        died = EngineDiedError("1 inference server(s) died: http://a: killed") if call.session == "p_1" else None
        return Reply([5, 2], text="x", delay_s=0.0 if died else 60.0, error=died)

    engine, script = FakeInferenceEngine(reply, tokenizer), EnvScript()
    generator = make_generator(engine, tokenizer, on_error="mask", max_attempts=3, deterministic=deterministic)
    began = time.monotonic()
    with pytest.raises(EngineDiedError, match="http://a: killed"):
        roll_out(generator, script, rows(3))
    assert time.monotonic() - began < 3
    assert [call.session for call in engine.calls].count("p_1") == 1  # no second try
    assert script.num_open == 0 and engine.open_sessions == set() and engine.running == 0 and not engine.paused


def test_a_death_is_told_before_the_failures_that_follow_from_it(tokenizer):
    def reply(call):
        if call.session == "p_2":
            return Reply([], error=EngineDiedError("killed"))
        return Reply([], error=InferenceError("cut"), delay_s=0.5)  # the transport waits for news of a death

    generator = make_generator(FakeInferenceEngine(reply, tokenizer), tokenizer, on_error="raise", max_attempts=1)
    with pytest.raises(EngineDiedError, match="killed"):
        roll_out(generator, EnvScript(), rows(3))


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply([], text=""), "returned no tokens"),
        (Reply([1, 2], text="", without_logprobs=True), "no log-probs"),
        (Reply([1, 2], text="", logprobs=[-1.0]), "2 tokens and 1 log-probs"),
    ],
)
def test_an_engine_that_answers_nonsense_is_recorded(tokenizer, reply, message):
    engine = FakeInferenceEngine(lambda call: reply, tokenizer)
    output = roll_out(make_generator(engine, tokenizer), EnvScript())
    assert message in output["rollouts"][0].failure.message


@pytest.fixture
def hang():
    release = threading.Event()
    yield release
    release.set()


def test_an_environment_that_hangs_costs_its_own_rollout_only(tokenizer, engine, hang):
    def block(env, action):
        if repetition(env) == 0:
            hang.wait()

    script = EnvScript(on_step=block)
    generator = make_generator(engine, tokenizer, env_timeout_s=0.1, max_attempts=1)
    output = roll_out(generator, script, rows(3))
    assert output["stop_reasons"] == ["timeout", "stop", "stop"]
    failure = output["rollouts"][0].failure
    assert failure.type == "DeadlineError" and "generator.env_timeout_s=0.1" in failure.message
    hang.set()
    wait_until(lambda: script.num_open == 0)


def test_hanging_environments_do_not_use_up_the_threads(tokenizer, engine, hang):
    script = EnvScript(on_step=lambda env, action: hang.wait() if repetition(env) < 4 else None)
    generator = make_generator(engine, tokenizer, env_timeout_s=0.1, max_attempts=1)
    generator.env_executor = type(generator.env_executor)(max_workers=2)
    output = roll_out(generator, script, rows(6))
    assert output["stop_reasons"] == ["timeout"] * 4 + ["stop"] * 2


def test_an_async_environment_that_hangs_is_cut(tokenizer, engine):
    class Sleeping(AsyncScriptedEnv):
        async def step(self, action):
            await asyncio.sleep(60)

    script = EnvScript()
    generator = make_generator(engine, tokenizer, env_timeout_s=0.1, max_attempts=1)
    output = roll_out(generator, script, cls=Sleeping)
    assert output["stop_reasons"] == ["timeout"] and script.num_open == 0


def test_a_rollout_that_takes_too_long_is_cut_and_not_tried_again(tokenizer):
    engine = FakeInferenceEngine(lambda call: Reply([5, 2], text="x", delay_s=60 if call.session == "p_0" else 0))
    script = EnvScript()
    output = roll_out(make_generator(engine, tokenizer, trajectory_timeout_s=0.2), script, rows(2))
    assert output["stop_reasons"] == ["timeout", "stop"]
    failure = output["rollouts"][0].failure
    assert failure.where == "engine" and "generator.trajectory_timeout_s=0.2" in failure.message
    assert script.num_open == 0 and engine.open_sessions == set()


def test_a_failing_close_is_logged_and_changes_nothing(tokenizer, engine, caplog):
    def broken(env):
        raise OSError("disk")

    output = roll_out(make_generator(engine, tokenizer), EnvScript(on_close=broken))
    assert output["stop_reasons"] == ["stop"]
    assert "close() failed" in caplog.text and engine.open_sessions == set()


@pytest.mark.parametrize("cls", [ScriptedEnv, AsyncScriptedEnv])
@settings(max_examples=25, deadline=None)
@given(delay_ms=st.integers(0, 25), seed=st.integers(0, 3))
def test_cancelling_at_any_moment_leaves_no_session_and_no_environment_open(cls, delay_ms, seed):
    tokenizer = make_byte_tokenizer()
    dice = random.Random(seed)
    engine = FakeInferenceEngine(lambda call: Reply([5, 2], text="x", delay_s=dice.random() / 100))
    script = EnvScript(on_step=lambda env, action: time.sleep(0.002), num_steps=4)
    generator = make_generator(engine, tokenizer)

    async def run():
        task = asyncio.create_task(generator.generate(rows(4)))
        await asyncio.sleep(delay_ms / 1000)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=10)
        assert done, "cancelling took too long"

    with registered(script, cls=cls):
        asyncio.run(run())
        wait_until(lambda: script.num_open == 0)
    assert engine.open_sessions == set() and engine.running == 0


def test_the_deterministic_mode_starts_a_batch_at_once_in_its_own_order(tokenizer):
    def reply(call):
        row = int(str(call.session)[2:])
        return Reply([10 + row, 2], delay_s=0.0 if call.turn else 0.01 * (3 - row))

    engine = FakeInferenceEngine(reply, tokenizer)
    generator = make_generator(engine, tokenizer, deterministic=True)
    roll_out(generator, EnvScript(num_steps=2), rows(4))
    assert engine.log[:6] == ["pause", "resume", "answer p_0", "answer p_1", "answer p_2", "answer p_3"]
    assert {call.session: call.priority for call in engine.calls} == {f"p_{row}": row for row in range(4)}
    assert engine.log.count("pause") == engine.log.count("resume") == 1


def test_the_deterministic_mode_counts_out_rollouts_that_never_reach_the_engine(tokenizer):
    engine = FakeInferenceEngine(
        lambda call: Reply([5, 2], text="x", error=OSError("refused") if str(call.session).startswith("p_2") else None)
    )

    def broken(env, prompt):
        if repetition(env) == 1:
            raise ValueError("no data")
        return prompt

    script = EnvScript(on_init=broken)
    output = roll_out(make_generator(engine, tokenizer, deterministic=True), script, rows(4))
    assert output["stop_reasons"] == ["stop", "error", "error", "stop"]
    assert engine.log[:2] == ["pause", "resume"] and not engine.paused


def test_the_deterministic_mode_gives_up_with_a_deadline_and_resumes(tokenizer, engine):
    generator = make_generator(engine, tokenizer, deterministic=True)
    generator.generator_cfg.inference_engine.control_timeout_s = 0.1

    async def never(count, timeout_s):
        raise DeadlineError("the client", "queued requests", timeout_s, "timeout_s")

    engine.wait_until_queued = never
    script = EnvScript()
    with pytest.raises(DeadlineError):
        roll_out(generator, script, rows(2))
    assert not engine.paused and script.num_open == 0 and engine.open_sessions == set()


def test_the_deterministic_mode_refuses_what_cannot_queue_at_once(tokenizer, engine):
    limit = RateLimitConfig(enabled=True, max_concurrency=2)
    generator = make_generator(engine, tokenizer, deterministic=True, rate_limit=limit)
    with pytest.raises(ConfigError, match="max_concurrency=2 must not be smaller"):
        roll_out(generator, EnvScript(), rows(3))
    with pytest.raises(ConfigError, match="queues all 600 rollouts"):
        roll_out(make_generator(engine, tokenizer, deterministic=True), EnvScript(), rows(600))


def test_a_rate_limit_bounds_what_runs_at_one_time(tokenizer):
    engine = FakeInferenceEngine(lambda call: Reply([5, 2], text="x", delay_s=0.01))
    script = EnvScript()
    limit = RateLimitConfig(enabled=True, max_concurrency=2)
    seen = []
    script.on_step = lambda env, action: seen.append(script.num_open)
    roll_out(make_generator(engine, tokenizer, rate_limit=limit), script, rows(6))
    assert max(seen) <= 2 and len(seen) == 6


def test_progress_is_told_once_per_rollout(tokenizer, engine):
    generator = make_generator(engine, tokenizer)
    ended = []
    generator.on_rollout_done = lambda: ended.append(1)
    roll_out(generator, EnvScript(on_step=fail_when(lambda env: repetition(env) == 0, OSError("x"))), rows(3))
    assert len(ended) == 3


def wait_until(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
