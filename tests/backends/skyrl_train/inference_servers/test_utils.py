import sys

import pytest

from skyrl.backends.skyrl_train.inference_servers import utils
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError


def config() -> SkyRLTrainConfig:
    cfg = SkyRLTrainConfig()
    cfg.trainer.policy.model.path = "org/model"
    cfg.trainer.placement.colocate_all = False
    return cfg


def test_cpu_servers_hold_their_worker_and_bound_their_cache():
    cfg = config()
    cfg.generator.inference_engine.cpu_kv_cache_gb = 0.5
    args = utils.build_vllm_cli_args(cfg, "cpu")
    assert args.distributed_executor_backend == "uni"
    assert args.kv_cache_memory_bytes == 2**29
    assert args.weight_transfer_config == {"backend": "gloo"}
    assert "enable_sleep_mode" not in vars(args)


def test_gpu_servers_sleep_where_trainer_and_engines_share_gpus():
    cfg = config()
    assert not utils.build_vllm_cli_args(cfg, "cuda").enable_sleep_mode
    cfg.trainer.placement.colocate_all = True
    args = utils.build_vllm_cli_args(cfg, "cuda")
    assert args.enable_sleep_mode
    assert args.distributed_executor_backend == "ray"


def test_logprobs_are_those_of_the_distribution_that_sampled():
    assert utils.build_vllm_cli_args(config(), "cpu").logprobs_mode == "processed_logprobs"


@pytest.mark.parametrize(("deterministic", "policy"), [(False, "fcfs"), (True, "priority")])
def test_deterministic_runs_schedule_by_priority(deterministic, policy):
    cfg = config()
    cfg.generator.deterministic = deterministic
    assert utils.build_vllm_cli_args(cfg, "cpu").scheduling_policy == policy


def test_engine_init_kwargs_win():
    cfg = config()
    cfg.generator.inference_engine.engine_init_kwargs = {"max_model_len": 99, "dtype": "float32"}
    args = utils.build_vllm_cli_args(cfg, "cpu")
    assert (args.max_model_len, args.dtype) == (99, "float32")


def test_the_model_is_named_as_served_or_by_its_path():
    cfg = config()
    assert utils.resolve_policy_model_name(cfg) == "org/model"
    assert utils.build_vllm_cli_args(cfg, "cpu").served_model_name is None
    cfg.generator.inference_engine.served_model_name = "policy"
    assert utils.resolve_policy_model_name(cfg) == "policy"
    assert utils.build_vllm_cli_args(cfg, "cpu").served_model_name == ["policy"]


def test_building_arguments_loads_no_vllm():
    utils.build_vllm_cli_args(config(), "cpu")
    if "vllm" in sys.modules:
        pytest.skip("an earlier test of this session imported vllm")


@pytest.mark.parametrize(
    ("mode", "device", "resolved"),
    [("auto", "cpu", "embedded"), ("auto", "cuda", "process"), ("process", "cpu", "process")],
)
def test_auto_embeds_cpu_engines_only(mode, device, resolved):
    cfg = config()
    cfg.generator.inference_engine.server_mode = mode
    assert utils.resolve_server_mode(cfg.generator.inference_engine, device) == resolved


@pytest.mark.parametrize(("mode", "device"), [("embedded", "cuda"), ("thread", "cpu")])
def test_impossible_server_modes_are_refused(mode, device):
    cfg = config()
    cfg.generator.inference_engine.server_mode = mode
    with pytest.raises(ConfigError, match="server_mode"):
        utils.resolve_server_mode(cfg.generator.inference_engine, device)


def test_a_cpu_server_gets_threads_no_compiler_and_cached_bytecode():
    env = utils.server_environment(utils.build_vllm_cli_args(config(), "cpu"), "cpu", cpu_threads=3)
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["TORCHDYNAMO_DISABLE"] == "1"
    assert env["PYTHONDONTWRITEBYTECODE"] == ""
    assert "HF_HUB_OFFLINE" not in env
    assert "SKYRL_SERVER_ACCESS_TOKEN" not in env


def test_a_gpu_server_compiles_and_a_local_model_needs_no_hub(tmp_path):
    cfg = config()
    cfg.trainer.policy.model.path = str(tmp_path)
    env = utils.server_environment(utils.build_vllm_cli_args(cfg, "cuda"), "cuda", access_token="t")
    assert "TORCHDYNAMO_DISABLE" not in env
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["SKYRL_SERVER_ACCESS_TOKEN"] == "t"


def test_router_arguments_for_plain_and_for_split_servers():
    engine = config().generator.inference_engine
    engine.router_init_kwargs = {"policy": "sticky_least_loaded"}
    plain = utils.build_router_args(engine, ["http://a", "http://b"])
    assert plain["worker_urls"] == ["http://a", "http://b"]
    assert plain["policy"] == "sticky_least_loaded"
    assert plain["log_level"] == "error"
    split = utils.build_router_args(engine, prefill_urls=["http://p"], decode_urls=["http://d"])
    assert (split["prefill_urls"], split["decode_urls"]) == ([("http://p", None)], ["http://d"])
    with pytest.raises(ValueError, match="needs server_urls"):
        utils.build_router_args(engine)
