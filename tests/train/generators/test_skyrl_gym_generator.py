"""The loop on a scripted engine and a scripted environment: tokens, masks, rewards, limits, settings."""

import pytest

from skyrl.errors import ConfigError
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.output_checks import validate_generator_output
from skyrl.utils.seeds import request_seed
from tests.fakes.environments import AsyncScriptedEnv, EnvScript
from tests.fakes.generators import PROMPT, make_batch, make_generator, roll_out
from tests.fakes.inference_engine import FakeInferenceEngine, Reply, script_of
from tests.fakes.tokenizers import make_byte_tokenizer

OBSERVATION = [{"role": "user", "content": "1"}]


@pytest.fixture(scope="module")
def tokenizer():
    return make_byte_tokenizer()


class FixedTokens:
    """Says how many tokens a conversation has: 4 for the prompt (or `prompt`), `obs` for an observation."""

    eos_token_id, pad_token_id, eos_token = 2, 0, "<eos>"
    all_special_ids = (0, 2)

    def __init__(self, prompt=4, obs=4):
        self.lengths = {"2+2?": prompt, "1": obs}

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, return_dict):
        assert tokenize and not return_dict
        return [9 for message in messages for _ in range(self.lengths.get(message["content"], 1))]

    def encode(self, text, add_special_tokens):
        return [77] if text else []


def test_one_turn_gives_the_sampled_ids_and_trains_all_of_them(tokenizer):
    engine = FakeInferenceEngine(script_of("4", tokenizer=tokenizer), tokenizer)
    output = roll_out(make_generator(engine, tokenizer), EnvScript(rewards=(0.5,)))
    (response,) = output["response_ids"]
    assert tokenizer.decode(response) == "4<|im_end|>"
    assert (
        tokenizer.decode(output["prompt_token_ids"][0]) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert output["loss_masks"] == [[1, 1]]
    assert output["rewards"] == [[0.0, 0.5]]
    assert output["rollout_logprobs"] == [[-0.01, -0.02]]
    assert output["stop_reasons"] == ["stop"]
    validate_generator_output(1, output)


def test_turns_are_joined_by_the_templates_own_text_and_only_sampled_ids_train(tokenizer):
    engine = FakeInferenceEngine(script_of("b", "c", tokenizer=tokenizer), tokenizer)
    script = EnvScript(observations=(OBSERVATION, ()), rewards=(0.25, 1.0), num_steps=2)
    output = roll_out(make_generator(engine, tokenizer), script)
    (response,), (mask,) = output["response_ids"], output["loss_masks"]
    assert (
        tokenizer.decode(response) == "b<|im_end|>\n<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\nc<|im_end|>"
    )
    assert (
        tokenizer.decode([token for token, bit in zip(response, mask, strict=True) if bit]) == "b<|im_end|>c<|im_end|>"
    )
    assert output["rewards"][0][1] == 0.25 and output["rewards"][0][-1] == 1.0 and sum(output["rewards"][0]) == 1.25
    messages = output["rollouts"][0].messages
    assert [m["content"] for m in messages] == ["2+2?", "b", "1", "c"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant"]


def test_rewards_of_four_sampled_two_observed_four_sampled_lie_at_3_and_9():
    tokenizer = FixedTokens(obs=2)
    engine = FakeInferenceEngine(lambda call: Reply([5, 5, 5, 2], text="x"))
    script = EnvScript(observations=(OBSERVATION, ()), rewards=(0.3, 1.7), num_steps=2)
    output = roll_out(make_generator(engine, tokenizer), script)
    assert output["rewards"] == [[0, 0, 0, 0.3, 0, 0, 0, 0, 0, 1.7]]
    assert output["loss_masks"] == [[1, 1, 1, 1, 0, 0, 1, 1, 1, 1]]


def test_without_an_observation_the_next_turn_starts_with_the_generation_prompt(tokenizer):
    engine = FakeInferenceEngine(script_of("b", "c", tokenizer=tokenizer), tokenizer)
    output = roll_out(make_generator(engine, tokenizer), EnvScript(num_steps=2))
    assert tokenizer.decode(output["response_ids"][0]) == "b<|im_end|><|im_start|>assistant\nc<|im_end|>"


def test_thinking_stays_in_the_context():
    tokenizer = make_byte_tokenizer("strips_thinking")
    engine = FakeInferenceEngine(script_of("<think>hm</think>b", "c", tokenizer=tokenizer), tokenizer)
    roll_out(make_generator(engine, tokenizer), EnvScript(observations=(OBSERVATION, ()), num_steps=2))
    assert "<think>hm</think>b<|im_end|>" in tokenizer.decode(engine.calls[1].prompt_ids)


@pytest.mark.parametrize(
    ("prompt", "obs", "sampled", "limit", "steps", "length"),
    [
        (4, 4, 2, 20, 3, 14),  # 4, 10, 16, 22 > 20; 3 x 2 sampled, 2 x 4 observed
        (4, 4, 20, 20, 1, 20),
        (13, 13, 4, 50, 3, 38),  # 13, 30, 47, 64 > 50
    ],
)
def test_the_limit_is_checked_before_every_call_and_the_last_observation_is_dropped(
    prompt, obs, sampled, limit, steps, length
):
    engine = FakeInferenceEngine(lambda call: Reply([5] * sampled, text="x"))
    script = EnvScript(observations=(OBSERVATION,), num_steps=None)
    generator = make_generator(engine, FixedTokens(prompt, obs), max_input_length=limit)
    output = roll_out(generator, script)
    assert script.num_steps_taken == steps
    assert len(output["response_ids"][0]) == length
    assert output["stop_reasons"] == ["length"]


def test_a_prompt_beyond_the_limit_becomes_a_masked_row_and_no_call():
    engine = FakeInferenceEngine(lambda call: Reply([5], text="x"))
    generator = make_generator(engine, FixedTokens(prompt=30), max_input_length=20)
    script = EnvScript()
    output = roll_out(generator, script)
    assert output["prompt_token_ids"] == [[9] * 30]
    assert (output["response_ids"], output["loss_masks"], output["rewards"]) == ([[0]], [[0]], [[0.0]])
    assert output["rollout_logprobs"] == [[0.0]]
    assert output["stop_reasons"] == ["length"]
    assert output["rollout_metrics"]["generate/num_prompt_too_long"] == 1
    assert engine.calls == [] and script.num_open == 0


def test_calls_stay_inside_the_context_of_the_engine():
    engine = FakeInferenceEngine(lambda call: Reply([5] * 2, text="x"))
    generator = make_generator(engine, FixedTokens())
    generator.generator_cfg.inference_engine.engine_init_kwargs = {"max_model_len": 15}
    generator.generator_cfg.sampling_params.max_generate_length = 8
    output = roll_out(generator, EnvScript(observations=(OBSERVATION,), num_steps=None))
    assert [call.sampling_params["max_tokens"] for call in engine.calls] == [8, 5]  # 15 - 4, 15 - 10; 16 is too long
    assert output["stop_reasons"] == ["length"]


def test_one_assistant_message_gets_observations_written_into_it():
    engine = FakeInferenceEngine(lambda call: Reply([10, 11, 12], text="x"))
    script = EnvScript(observations=(OBSERVATION, ()), rewards=(0.3, 1.7), num_steps=2)
    output = roll_out(make_generator(engine, FixedTokens(), use_conversation_multi_turn=False), script)
    assert output["response_ids"] == [[10, 11, 12, 77, 10, 11, 12, 2]]
    assert output["loss_masks"] == [[1, 1, 1, 0, 1, 1, 1, 0]]
    assert output["rewards"] == [[0, 0, 0.3, 0, 0, 0, 1.7, 0]]
    assert output["rollout_logprobs"][0][-1] == 0.0


def test_one_assistant_message_drops_the_end_token_between_turns_and_keeps_the_last_one():
    engine = FakeInferenceEngine(lambda call: Reply([10, 2], text="x", logprobs=[-0.5, -0.7]))
    script = EnvScript(observations=(OBSERVATION, ()), num_steps=2, rewards=(0.0, 1.0))
    output = roll_out(make_generator(engine, FixedTokens(), use_conversation_multi_turn=False), script)
    assert output["response_ids"] == [[10, 77, 10, 2]]
    assert output["rollout_logprobs"] == [[-0.5, 0.0, -0.5, -0.7]]
    assert output["loss_masks"] == [[1, 0, 1, 1]]
    assert output["rewards"] == [[0, 0, 0, 1.0]]


def test_one_assistant_message_gets_no_end_token_when_it_was_cut():
    engine = FakeInferenceEngine(lambda call: Reply([10, 11], "length", text="x"))
    output = roll_out(make_generator(engine, FixedTokens(), use_conversation_multi_turn=False), EnvScript())
    assert output["response_ids"] == [[10, 11]]
    assert output["stop_reasons"] == ["length"]


def test_a_stop_string_closes_the_turn_with_an_untrained_end_token(tokenizer):
    ids = tokenizer.encode("b</answer>", add_special_tokens=False)
    engine = FakeInferenceEngine(lambda call: Reply(ids), tokenizer)
    script = EnvScript(observations=(OBSERVATION, ()), num_steps=2)
    generator = make_generator(engine, tokenizer, sampling={"stop": ["</answer>"]})
    output = roll_out(generator, script)
    text = "b</answer><|im_end|>\n<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\nb</answer><|im_end|>"
    assert tokenizer.decode(output["response_ids"][0]) == text
    assert sum(output["loss_masks"][0]) == 2 * len(ids)
    assert output["loss_masks"][0][-1] == 0 and output["rewards"][0][-2] == 1.0
    open_ended = make_generator(
        engine, tokenizer, sampling={"stop": ["</answer>"]}, append_eos_token_after_stop_str_in_multi_turn=False
    )
    assert roll_out(open_ended, EnvScript())["response_ids"] == [ids]


def test_a_cut_turn_ends_the_rollout(tokenizer):
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer, stop_reason="length"), tokenizer)
    output = roll_out(make_generator(engine, tokenizer), EnvScript(observations=(OBSERVATION,), num_steps=3))
    assert len(engine.calls) == 1
    assert output["stop_reasons"] == ["length"]
    assert output["rewards"] == [[1.0]]


def test_going_on_after_a_cut_turn_closes_it_first():
    tokenizer = make_byte_tokenizer("other_turn_end")
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer, stop_reason="length"), tokenizer)
    generator = make_generator(engine, tokenizer, continue_after_truncation=True)
    output = roll_out(generator, EnvScript(observations=(OBSERVATION, ()), num_steps=2))
    text = tokenizer.decode(output["response_ids"][0])
    assert text == "b<|turn_end|>\n<|im_start|>user\n1<|turn_end|>\n<|im_start|>assistant\nb"
    assert output["loss_masks"][0][:2] == [1, 0]


def test_a_replaced_response_keeps_the_part_that_was_sampled(tokenizer, caplog):
    engine = FakeInferenceEngine(script_of("abX", tokenizer=tokenizer), tokenizer)
    script = EnvScript(observations=(OBSERVATION, ()), replacements=("abc", None), num_steps=2)
    output = roll_out(make_generator(engine, tokenizer), script)
    assert tokenizer.decode(output["response_ids"][0]).startswith("abc\n<|im_start|>user")
    assert output["loss_masks"][0][:3] == [1, 1, 0]
    assert output["rollout_logprobs"][0][:3] == [-0.01, -0.02, 0.0]
    assert output["rollouts"][0].messages[1]["content"] == "abc"
    assert "postprocessed_action" in caplog.text


def test_the_engine_aborting_counts_as_failure(tokenizer):
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer, stop_reason="abort"), tokenizer)
    output = roll_out(make_generator(engine, tokenizer), EnvScript())
    assert output["stop_reasons"] == ["error"]
    assert output["rollouts"][0].failure.type == "InferenceError"


def test_the_environment_may_replace_the_prompt_and_the_row_stays_as_it_was(tokenizer):
    def add_system(env, prompt):
        prompt.insert(0, {"role": "system", "content": "Be brief."})
        return prompt

    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer)
    batch = make_batch()
    output = roll_out(make_generator(engine, tokenizer), EnvScript(on_init=add_system), batch)
    assert tokenizer.decode(output["prompt_token_ids"][0]).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert batch["prompts"] == [[{"role": "user", "content": "2+2?"}]]
    assert output["rollouts"][0].prompt == PROMPT


@pytest.mark.parametrize(
    ("configured", "row", "expected"),
    [(5, None, 5), (5, 3, 3), (5, 9, 5), (1, 9, 9), (1, None, 1)],
)
def test_a_rows_own_turn_limit_wins_when_smaller_or_when_the_run_has_the_default(tokenizer, configured, row, expected):
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer)
    extras = {} if row is None else {"max_turns": row}
    script = EnvScript()
    roll_out(make_generator(engine, tokenizer, max_turns=configured), script, make_batch(env_extras=[extras]))
    assert script.made[0].extras["max_turns"] == expected
    assert extras == ({} if row is None else {"max_turns": row})


@pytest.mark.parametrize(
    ("on", "version", "model", "expected"),
    [(True, 3, None, "3"), (True, 5, "my-model", "my-model@5"), (False, 3, None, None), (True, None, None, None)],
)
def test_cache_salt(tokenizer, on, version, model, expected):
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer, weight_version=version)
    roll_out(make_generator(engine, tokenizer, model=model, use_cache_salt=on), EnvScript())
    assert engine.calls[0].cache_salt == expected
    assert engine.calls[0].model == model


def test_version_zero_is_a_salt_too(tokenizer):
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer, weight_version=0)
    roll_out(make_generator(engine, tokenizer), EnvScript())
    assert engine.calls[0].cache_salt == "0"


def test_every_call_gets_its_own_seed(tokenizer):
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer)
    script = EnvScript(num_steps=2)
    roll_out(make_generator(engine, tokenizer, seed=7), script, make_batch(2))
    seeds = {(call.session, call.turn): call.sampling_params["seed"] for call in engine.calls}
    assert seeds == {(f"p_{rep}", turn): request_seed(7, "p", rep, turn, 1) for rep in (0, 1) for turn in (0, 1)}


def test_greedy_calls_and_runs_without_a_seed_send_none(tokenizer):
    for options in ({"seed": 7, "sampling": {"temperature": 0.0}}, {}):
        engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer)
        roll_out(make_generator(engine, tokenizer, **options), EnvScript())
        assert "seed" not in engine.calls[0].sampling_params


def test_weight_versions_span_the_rollout(tokenizer):
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer, weight_version=4)

    def sync_weights(env, action):
        engine.weight_version = 5

    output = roll_out(make_generator(engine, tokenizer), EnvScript(num_steps=2, on_step=sync_weights))
    assert output["weight_versions"] == [(4, 5)]
    assert output["rollouts"][0].weight_version == (4, 5)


def test_sampling_params_of_the_batch_win_and_may_differ_by_row(tokenizer):
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer)
    params = [{"temperature": 0.5, "max_tokens": 3, "stop": "x"}, {"temperature": 0.7, "max_tokens": 4}]
    output = roll_out(make_generator(engine, tokenizer), EnvScript(), make_batch(2, sampling_params=params))
    sent = {call.session: call.sampling_params for call in engine.calls}
    assert (sent["p_0"]["temperature"], sent["p_0"]["stop"], sent["p_1"]["max_tokens"]) == (0.5, ["x"], 4)
    assert output["rollout_logprobs"] is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([{}], "1 dicts for 2 prompts"),
        ({"logprobs": 2}, "must be null, 0 or 1"),
        ({"n": 2}, "n=2 must be 1"),
        ([{"logprobs": 1}, {}], "a batch must agree"),
    ],
)
def test_sampling_params_that_contradict_are_refused(tokenizer, params, message):
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer)
    with pytest.raises(ValueError, match=message):
        roll_out(make_generator(engine, tokenizer), EnvScript(), make_batch(2, sampling_params=params))


def test_rows_keep_the_order_of_the_input_whatever_ends_first(tokenizer):
    def reply(call):
        row = int(str(call.session).split("_")[1])
        return Reply([10 + row, 2], delay_s=0.02 * (3 - row))

    engine = FakeInferenceEngine(reply, tokenizer)
    output = roll_out(make_generator(engine, tokenizer), EnvScript(), make_batch(3))
    assert [ids[0] for ids in output["response_ids"]] == [10, 11, 12]
    assert [rollout.trajectory_id for rollout in output["rollouts"]] == [TrajectoryID("p", row) for row in range(3)]


def test_batched_is_one_turn_with_a_reward_per_row(tokenizer):
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer)
    script = EnvScript(num_steps=None, rewards=(0.5,), observations=(OBSERVATION,))
    output = roll_out(make_generator(engine, tokenizer, batched=True, max_turns=1), script, make_batch(2))
    assert output["rewards"] == [0.5, 0.5]
    assert output["loss_masks"] == [[1, 1], [1, 1]]
    assert len(engine.calls) == 2
    assert script.made[0].extras["max_turns"] == 1


def test_rewards_and_masks_of_cut_rows_can_be_zeroed(tokenizer):
    def reply(call):
        return Reply([10, 2], "stop") if call.session == "p_0" else Reply([10, 11], "length")

    engine = FakeInferenceEngine(reply, tokenizer)
    generator = make_generator(engine, tokenizer, zero_reward_on_non_stop=True, apply_overlong_filtering=True)
    output = roll_out(generator, EnvScript(), make_batch(2))
    assert output["rewards"] == [[0.0, 1.0], [0.0, 0.0]]
    assert output["loss_masks"] == [[1, 1], [0, 0]]
    assert output["rollout_metrics"]["generate/avg_assistant_tokens"] == 2  # raw


def test_async_environments_are_awaited(tokenizer):
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer)
    script = EnvScript(num_steps=2)
    output = roll_out(make_generator(engine, tokenizer), script, make_batch(2), cls=AsyncScriptedEnv)
    assert output["stop_reasons"] == ["stop", "stop"]
    assert script.num_open == 0


def test_without_threads_environments_run_on_the_loop(tokenizer):
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer)
    generator = make_generator(engine, tokenizer)
    generator.env_executor = None
    assert roll_out(generator, EnvScript())["stop_reasons"] == ["stop"]


def test_times_and_turns_are_recorded(tokenizer):
    engine = FakeInferenceEngine(lambda call: Reply([10, 2], delay_s=0.02), tokenizer)
    output = roll_out(make_generator(engine, tokenizer), EnvScript(num_steps=2, rewards=(0.0, 1.0)), make_batch(2))
    for row in range(2):
        total = output["trajectory_generation_times"][row]
        splits = {name: values[row] for name, values in output["trajectory_time_splits"].items()}
        assert 0.04 <= splits["llm"] <= splits["llm"] + splits["env"] <= total
        first, second = output["rollouts"][row].turns
        assert (first.n_sampled, first.reward, second.reward, first.stop_reason) == (2, 0.0, 1.0, "stop")
        assert second.prompt_len > first.prompt_len
    metrics = output["rollout_metrics"]
    assert metrics["generate/trajectory_time_llm_mean"] >= 0.04
    assert metrics["generate/tokens_per_turn_mean"] == 2


def test_metrics_of_the_environment_are_aggregated(tokenizer):
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer)
    output = roll_out(make_generator(engine, tokenizer), EnvScript(metrics={"tries": 2}), make_batch(2))
    assert output["rollout_metrics"]["environment/tries"] == 2.0
    assert output["env_metrics"] == [{"tries": 2}, {"tries": 2}]


def test_hooks_see_copies_before_the_environment_and_rows_after_it(tokenizer):
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer)
    generator = make_generator(engine, tokenizer)
    generator._setup_env_extras = lambda env_class, extras, params, trajectory_id: extras | {"tool": trajectory_id}

    def halve(output, env_extras, trajectory_id):
        output.reward = [value / 2 for value in output.reward]
        return output

    generator._post_process_agent_loop_output = halve
    script = EnvScript()
    output = roll_out(generator, script)
    assert script.made[0].extras["tool"] == TrajectoryID("p", 0)
    assert output["rewards"] == [[0.0, 0.5]]


def test_assigning_the_fixed_conversation_takes_effect(tokenizer):
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer)
    generator = make_generator(engine, tokenizer)
    generator.base_conversation, generator.base_conversation_token_ids = [], []
    output = roll_out(generator, EnvScript(observations=(OBSERVATION, ()), num_steps=2))
    assert tokenizer.decode(output["response_ids"][0]).startswith("b<|im_end|><|im_start|>user\n1<|im_end|>")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_wise_trajectories": True}, "step_wise_trajectories=true is not built yet"),
        ({"vision_language_generator": True}, "vision_language_generator=true is not built yet"),
        ({"batched": True, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs must be empty"),
        ({"max_attempts": 0}, "max_attempts=0 must be at least 1"),
        ({"on_error": "ignore"}, "on_error='ignore' must be"),
    ],
)
def test_settings_that_contradict_or_are_not_built_are_refused(tokenizer, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_generator(FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer), tokenizer, **changes)


def test_a_custom_template_is_refused(tokenizer):
    from skyrl.config.generator import ChatTemplateConfig

    with pytest.raises(ConfigError, match="custom chat templates are not built yet"):
        make_generator(
            FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer),
            tokenizer,
            chat_template=ChatTemplateConfig(name_or_path="qwen3_with_thinking"),
        )
