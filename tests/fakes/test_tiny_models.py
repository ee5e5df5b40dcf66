from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fakes.tiny_models import VOCABULARY, make_tiny_model, make_tiny_tokenizer


@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen3_moe"])
def test_a_written_model_loads_and_generates(tmp_path, arch):
    directory = make_tiny_model(tmp_path, arch, dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer) == len(VOCABULARY) == 128
    prompt = tokenizer("7 + 8 = ", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] <= 8 + 4


def test_the_seed_decides_the_weights_and_torchs_generator_is_untouched(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "a", seed=1))
    again = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "b", seed=1))
    other = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "c", seed=2))
    assert torch.equal(torch.rand(1), expected)
    weight = first.model.embed_tokens.weight
    assert torch.equal(weight, again.model.embed_tokens.weight)
    assert not torch.equal(weight, other.model.embed_tokens.weight)


def test_text_survives_the_character_tokenizer(tmp_path):
    text = "What is 17 + 4?\n\tAnswer:  {21}"
    make_tiny_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode("汉")) == "<|unk|>"


def test_the_chat_template_is_chatml():
    tokenizer = make_tiny_tokenizer()
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2
    assert tokenizer.pad_token_id == 0
    assert tokenizer.eos_token_id == 3


def test_a_chosen_alphabet_is_the_whole_vocabulary(tmp_path):
    directory = make_tiny_model(tmp_path, characters="0123456789 +=")
    assert AutoModelForCausalLM.from_pretrained(directory).config.vocab_size == 4 + 13


def test_an_unknown_architecture_is_refused(tmp_path):
    with pytest.raises(ValueError, match="mamba"):
        make_tiny_model(tmp_path, "mamba")
