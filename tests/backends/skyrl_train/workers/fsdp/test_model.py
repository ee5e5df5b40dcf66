from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl.backends.skyrl_train.workers.fsdp.critic_model import get_llm_for_sequence_regression
from skyrl.backends.skyrl_train.workers.fsdp.model import PLAIN_HEAD_MODELS, HFModelWrapper, position_ids_of
from skyrl.backends.skyrl_train.workers.micro_batches import trim_left_padding
from skyrl.errors import ConfigError, ModelLoadError
from tests.backends.skyrl_train.workers.batches import RESPONSE, SEQUENCE, make_batch
from tests.backends.skyrl_train.workers.plain_loop import response_log_probs


def run(model: HFModelWrapper, **options: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = make_batch()
    with torch.no_grad():
        result = model(
            batch["sequences"], RESPONSE, batch["attention_mask"], return_output=True, compute_entropy=True, **options
        )
    return result  # type: ignore[no-any-return]


def test_positions_start_with_the_first_real_token() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert position_ids_of(mask).tolist() == [[1, 1, 0, 1, 2], [0, 1, 2, 3, 4]]


def test_log_probs_and_entropy_equal_unpadded_rows(tiny_model: Path) -> None:
    model = HFModelWrapper(str(tiny_model), bf16=False, temperature=0.5, logprobs_chunk_size=7)
    batch = make_batch()
    with torch.no_grad():
        expected, entropies = response_log_probs(model.model, batch, 0.5)
    wanted = batch["response_mask"].bool()
    log_probs, output = run(model, response_mask=batch["response_mask"])
    torch.testing.assert_close(log_probs[wanted], expected[wanted], atol=2e-5, rtol=0)
    assert output["entropy"].shape == (len(batch), SEQUENCE)
    entropy = output["entropy"][:, -RESPONSE - 1 : -1]
    torch.testing.assert_close(entropy[wanted], entropies[wanted], atol=2e-5, rtol=0)


def test_without_a_response_mask_every_real_token_is_scored(tiny_model: Path) -> None:
    model = HFModelWrapper(str(tiny_model), bf16=False)
    batch = make_batch()
    log_probs, _ = run(model)
    only, _ = run(model, response_mask=batch["response_mask"])
    wanted = batch["response_mask"].bool()
    assert torch.equal(log_probs[wanted], only[wanted])
    assert (log_probs[~wanted] < 0).all()  # prompt tokens: rows of this batch have longer prompts than R


def test_dropping_common_padding_changes_nothing(tiny_model: Path) -> None:
    model = HFModelWrapper(str(tiny_model), bf16=False)
    rows = make_batch()[0:2]
    short = trim_left_padding(rows)
    with torch.no_grad():
        full, cut = (
            model(b["sequences"], RESPONSE, b["attention_mask"], response_mask=b["response_mask"])
            for b in (rows, short)
        )
    assert short["sequences"].shape[1] < SEQUENCE
    torch.testing.assert_close(full, cut, atol=2e-5, rtol=0)


def test_a_sequence_shorter_than_the_response_width_is_padded_in_front(tiny_model: Path) -> None:
    model = HFModelWrapper(str(tiny_model), bf16=False)
    ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4, dtype=torch.long)
    response = torch.tensor([[0, 0, 0, 0, 0, 1, 1]])
    with torch.no_grad():
        got = model(ids, 7, mask, response_mask=response)
        log_p = torch.log_softmax(model.model(ids).logits[0], -1)
    assert got.shape == (1, 7)
    torch.testing.assert_close(got[0, -2:], torch.stack([log_p[1, 7], log_p[2, 8]]), atol=2e-5, rtol=0)
    assert not got[0, :5].any()


@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen3_moe"])
def test_the_short_way_equals_the_models_own_forward(make_model: object, arch: str) -> None:
    path = make_model(arch)  # type: ignore[operator]
    model = HFModelWrapper(str(path), bf16=False, temperature=0.9)
    assert model.model.config.model_type in PLAIN_HEAD_MODELS
    short, _ = run(model)
    model._plain_head = False
    long, _ = run(model)
    torch.testing.assert_close(short, long, atol=2e-5, rtol=0)


@pytest.mark.parametrize("model_type", sorted(PLAIN_HEAD_MODELS))
def test_every_plain_head_is_plain(model_type: str) -> None:
    """A tiny model of each type: lm_head of the last hidden state is exactly what its forward returns."""
    config = AutoConfig.for_model(model_type)
    small = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    small |= {"num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0, "moe_intermediate_size": 16}
    for name, value in small.items():
        setattr(config, name, value)
    for name in ("num_experts", "num_local_experts", "num_experts_per_tok"):
        if name in vars(config):
            setattr(config, name, 2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        assert torch.equal(model.get_output_embeddings()(hidden), model(ids, use_cache=False).logits)


def test_what_cannot_be_loaded_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"model.path='.*nothing'"):
        HFModelWrapper(str(tmp_path / "nothing"))


def test_temperature_zero_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        HFModelWrapper(str(tiny_model), temperature=0.0)


def test_one_notice_says_what_is_used(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        HFModelWrapper(str(tiny_model), use_flash_attention_2=True, remove_microbatch_padding=True)
    notices = [record.getMessage() for record in caplog.records if "padded batches" in record.getMessage()]
    assert notices == [
        "trainer.flash_attn=true and trainer.remove_microbatch_padding=true: "
        "training uses padded batches and SDPA attention"
    ]


def test_values_are_aligned_like_log_probs(tiny_model: Path) -> None:
    critic = get_llm_for_sequence_regression(str(tiny_model), "critic", value_head_prefix="my_head", seed=3).eval()
    assert dict(critic.named_parameters())["my_head.weight"].shape == (1, 64)
    batch = make_batch()
    with torch.no_grad():
        values = critic(batch["sequences"], RESPONSE, batch["attention_mask"])
        row = batch["sequences"][0][batch["attention_mask"][0].bool()]
        states = critic.model(row.unsqueeze(0)).last_hidden_state
        expected = critic.head(states)[0, :, 0]
    torch.testing.assert_close(values[0, -4:], expected[-5:-1], atol=2e-5, rtol=0)


def test_only_critics_are_built(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="reward"):
        get_llm_for_sequence_regression(str(tiny_model), "reward")
