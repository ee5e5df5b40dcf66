"""Greedy rollouts beside the samples, through the real generator on a fake engine."""

import asyncio
import math

from skyrl.train.generators.base import BatchMetadata, TrajectoryID
from skyrl.train.stages.baseline import add_greedy_rollouts, split_off_greedy
from skyrl.train.stages.rolled_out import RolledOut
from tests.fakes.environments import EnvScript, registered
from tests.fakes.generators import make_batch, make_generator
from tests.fakes.inference_engine import FakeInferenceEngine, script_of
from tests.fakes.tokenizers import make_byte_tokenizer

SAMPLING = {"temperature": 1.0, "max_tokens": 8, "logprobs": 1}
UIDS = ["p", "p", "q", "q"]


def make_inputs():
    inputs = make_batch(
        4,
        trajectory_ids=[TrajectoryID(uid, row % 2) for row, uid in enumerate(UIDS)],
        env_extras=[{"row": row, "kept": []} for row in range(4)],
        sampling_params=SAMPLING,
        batch_metadata=BatchMetadata(global_step=3, training_phase="train"),
    )
    return inputs, add_greedy_rollouts(inputs, UIDS, SAMPLING)


def test_one_row_per_prompt_follows_the_samples():
    inputs, joined = make_inputs()
    assert [name.to_string() for name in joined["trajectory_ids"]] == [
        *("p_0", "p_1", "q_0", "q_1"),
        *("p#greedy_0", "q#greedy_0"),
    ]
    assert joined["sampling_params"] == [SAMPLING] * 4 + [SAMPLING | {"temperature": 0.0}] * 2
    assert [extras["row"] for extras in joined["env_extras"]] == [0, 1, 2, 3, 0, 2]
    assert joined["env_extras"][4]["kept"] is not joined["env_extras"][0]["kept"]
    assert joined["batch_metadata"] is inputs["batch_metadata"]
    assert inputs["sampling_params"] is SAMPLING and len(inputs["prompts"]) == 4


def rolled_out(generator, script, joined):
    async def run():
        async with asyncio.timeout(20):
            return await generator.generate(joined)

    with registered(script):
        columns = dict(asyncio.run(run()))
    metrics = columns.pop("rollout_metrics")
    return RolledOut(inputs=joined, output=columns, uids=UIDS, metrics=metrics)


def test_the_generator_samples_and_decodes_greedily_in_one_call():
    """Five tokens for samples, two for greedy ones: metrics of rollouts are those of the samples."""
    tokenizer = make_byte_tokenizer()
    done = []

    def answer(call):
        text = "no" if call.sampling_params["temperature"] == 0.0 else "maybe"
        return script_of(text, tokenizer=tokenizer)(call)

    engine = FakeInferenceEngine(answer, tokenizer)
    generator = make_generator(engine, tokenizer, seed=1, sampling={"logprobs": 1})
    generator.on_rollout_done = lambda: done.append(1)
    _, joined = make_inputs()
    rolled = rolled_out(generator, EnvScript(rewards=(0.75,)), joined)
    split = split_off_greedy(rolled, lambda output: output)
    assert len(done) == 6
    seeds = [call.sampling_params.get("seed") for call in engine.calls]
    greedy = [call.sampling_params["temperature"] == 0.0 for call in engine.calls]
    assert greedy.count(True) == 2
    assert [seed is None for seed in seeds] == greedy
    assert split.output["baseline_scores"] == [0.75] * 4
    assert split.uids == UIDS
    lengths = {len(row) for row in split.output["response_ids"]}
    (aside,) = split.aside
    assert aside.uids == ["p#greedy", "q#greedy"]
    assert len(lengths) == 1 and max(lengths) > max(len(row) for row in aside.output["response_ids"])
    assert split.metrics["generate/min_num_tokens"] == split.metrics["generate/max_num_tokens"] == lengths.pop()
    assert split.metrics["generate/num_failed"] == 0


def test_a_greedy_rollout_that_failed_leaves_its_prompt_without_a_baseline():
    tokenizer = make_byte_tokenizer()

    def on_step(env, action):
        if action == "no" and env.extras["row"] == 2:
            raise ValueError("boom")

    def answer(call):
        text = "no" if call.sampling_params["temperature"] == 0.0 else "maybe"
        return script_of(text, tokenizer=tokenizer)(call)

    generator = make_generator(FakeInferenceEngine(answer, tokenizer), tokenizer, sampling={"logprobs": 1})
    _, joined = make_inputs()
    rolled = rolled_out(generator, EnvScript(on_step=on_step, rewards=(0.5,)), joined)
    split = split_off_greedy(rolled, lambda output: {**output, "rewards": [2.0] * len(output["rewards"])})
    scores = split.output["baseline_scores"]
    assert scores[:2] == [2.0, 2.0]
    assert all(math.isnan(score) for score in scores[2:])
    assert split.output["rewards"] == rolled.output["rewards"][:4]
