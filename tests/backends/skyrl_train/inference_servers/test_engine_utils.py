import pytest

from skyrl.backends.skyrl_train.inference_servers import engine_utils
from skyrl.config.generator import SamplingParams
from skyrl.errors import ConfigError


def test_config_becomes_vllm_parameters():
    config = SamplingParams(max_generate_length=7, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, stop=["x"])
    assert engine_utils.get_sampling_params_for_backend("vllm", config) == {
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "logprobs": 1,
        "stop": ["x"],
    }


def test_a_single_stop_string_is_one_string():
    config = SamplingParams()
    config.stop = "####"
    assert engine_utils.get_vllm_sampling_params(config)["stop"] == ["####"]


def test_additional_parameters_never_replace_the_others():
    config = SamplingParams(temperature=0.5, additional_kwargs={"temperature": 9.0, "seed": 1})
    params = engine_utils.get_vllm_sampling_params(config)
    assert (params["temperature"], params["seed"]) == (0.5, 1)


@pytest.mark.parametrize(("penalty", "sent"), [(1.0, False), (1.2, True)])
def test_repetition_penalty_is_sent_when_it_does_something(penalty, sent):
    params = engine_utils.get_vllm_sampling_params(SamplingParams(repetition_penalty=penalty))
    assert ("repetition_penalty" in params) == sent


def test_an_unknown_parameter_is_refused_with_near_names():
    config = SamplingParams(additional_kwargs={"stop_token_id": [1]})
    with pytest.raises(ConfigError, match="stop_token_ids"):
        engine_utils.get_vllm_sampling_params(config)


def test_other_backends_are_refused():
    with pytest.raises(ValueError, match="sglang"):
        engine_utils.get_sampling_params_for_backend("sglang", SamplingParams())


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # those of importing vLLM
def test_the_known_parameters_are_those_of_the_installed_vllm():
    import msgspec
    from vllm.sampling_params import SamplingParams as VLLMSamplingParams

    public = {field.name for field in msgspec.structs.fields(VLLMSamplingParams) if not field.name.startswith("_")}
    assert public - {"output_text_buffer_length"} == engine_utils.VLLM_SAMPLING_FIELDS
