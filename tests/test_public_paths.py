"""Import paths and names that users of upstream rely on. A path joins when its feature is built."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PROMISED = {
    "skyrl.train.config": """
        AlgorithmConfig BaseConfig ChatTemplateConfig CISPOConfig ClipCovConfig CriticConfig DataConfig
        DynamicSamplingConfig EnvironmentConfig FSDPConfig FullyAsyncConfig GeneratorConfig InferenceEngineConfig
        KLCovConfig KLCtrlConfig MegatronConfig MixedPrecisionConfig ModelConfig OffPolicyCorrectionConfig
        OptimizerConfig PlacementConfig PolicyConfig RefConfig SAPOConfig SamplingParams SkyRLGymConfig SkyRLLoraConfig
        SkyRLTrainConfig TrainerConfig
        get_config_as_dict get_config_as_yaml_str make_config""",
    "skyrl.train.config.config": "BaseConfig TrainerConfig make_config",
    "skyrl.train.utils": """
        Timer initialize_ray validate_cfg validate_generator_cfg get_ray_pg_ready_with_timeout
        prepare_runtime_environment ResolvedPlacementGroup""",
    "skyrl.train.utils.utils": """
        Timer initialize_ray validate_cfg validate_generator_cfg get_ray_pg_ready_with_timeout
        prepare_runtime_environment ResolvedPlacementGroup""",
    "skyrl.train.utils.trainer_utils": """
        ResumeMode build_dataloader calculate_per_dataset_metrics concatenate_generator_outputs
        dump_per_dataset_eval_results validate_generator_output handle_dynamic_sampling zero_variance_filter
        cleanup_old_checkpoints""",
    "skyrl.train.utils.callbacks": "CallbackInput TrainingCallback TrainingControl",
    "skyrl.train.utils.rate_limiter": "RateLimiterConfig create_rate_limiter AsyncRateLimiter",
    "skyrl.train.utils.tracking": "Tracking",
    "skyrl.train.utils.trajectory_logging": "TrajectoryLogger pretty_print_example",
    "skyrl.train.entrypoints.main_base": "BasePPOExp config_dir validate_cfg main",
    "skyrl.train.entrypoints.main_generate": "EvalOnlyEntrypoint main",
    "skyrl.train.entrypoints.serve": "main",
    "skyrl.train.entrypoints.launch": "run_hydra",
    "skyrl.train.trainer": "RayPPOTrainer",
    "skyrl.train.evaluate": "evaluate",
    "skyrl.train.generators.base": """
        BatchMetadata ConversationType GeneratorInput GeneratorInterface GeneratorOutput TrainingPhase TrajectoryID""",
    "skyrl.train.generators.skyrl_gym_generator": "SkyRLGymGenerator GeneratorInput GeneratorOutput TrajectoryOutput",
    "skyrl.train.generators.utils": "prepare_generator_input get_rollout_metrics get_metrics_from_generator_output",
    "skyrl.train.dataset": "PromptDataset",
    "skyrl.train.dataset.preprocess": "convert_prompts_responses_to_batch_tensors",
    "skyrl.train.dataset.replay_buffer": "Experience",
    "skyrl.backends.skyrl_train.utils.ppo_utils": """
        AdvantageEstimatorRegistry PolicyLossRegistry register_advantage_estimator register_policy_loss sync_registries
        get_kl_controller masked_whiten compute_approx_kl compute_advantages_and_returns
        apply_loss_reduction_to_advantages_minibatch""",
    "skyrl.backends.skyrl_train.utils.off_policy_correction_utils": """
        apply_off_policy_correction compute_off_policy_correction compute_outlier_token_mask compute_sequence_mask
        compute_tis_ratio compute_token_mask off_policy_correction_enabled""",
    "skyrl.backends.skyrl_train.utils.torch_utils": "",
    "skyrl.backends.skyrl_train.inference_servers.base": """
        ConversationType InferenceEngineInput InferenceEngineInterface InferenceEngineOutput""",
    "skyrl.backends.skyrl_train.inference_servers.remote_inference_client": """
        RemoteInferenceClient PauseMode raise_for_status""",
    "skyrl.backends.skyrl_train.inference_servers.utils": """
        build_vllm_cli_args resolve_policy_model_name build_router_args""",
    "skyrl.backends.skyrl_train.inference_servers.engine_utils": "get_sampling_params_for_backend",
    "skyrl.backends.skyrl_train.inference_servers.common": "get_node_ip",
    "skyrl.backends.skyrl_train.inference_servers.server_group": "ServerGroup",
    "skyrl.backends.skyrl_train.inference_servers.setup": "create_inference_servers build_new_inference_client",
    "skyrl.backends.skyrl_train.training_batch": """
        TensorBatch TensorList TrainingInputBatch TrainingOutputBatch pad_training_input_batch""",
    "skyrl.backends.skyrl_train.workers.worker": "PPORayActorGroup Worker",
    "skyrl.backends.skyrl_train.workers.worker_dispatch": "WorkerDispatch",
    "skyrl.backends.skyrl_train.workers.worker_utils": "reduce_metrics get_microbatch_iterator",
    "skyrl.backends.skyrl_train.workers.model_wrapper": "HFModelWrapper logprobs_from_logits",
    "skyrl.backends.skyrl_train.distributed.dispatch": """
        MeshRank ActorInfo DispatchRegistry WorkerOutput loss_fn_outputs_to_tensor""",
    "skyrl.backends.skyrl_train.weight_sync": "",
    "skyrl.env_vars": "SKYRL_RAY_PG_TIMEOUT_IN_S SKYRL_WAIT_UNTIL_INFERENCE_SERVER_HEALTHY_TIMEOUT_S",
    "skyrl.utils.storage": "",
    "skyrl_gym": "Env make spec register registry pprint_registry envs tools error",
    "skyrl_gym.envs": "register deregister",
    "skyrl_gym.envs.base_text_env": "BaseTextEnv BaseTextEnvStepOutput ConversationType MessageType",
    "skyrl_gym.envs.registration": "register",
    "skyrl_gym.metrics": "default_aggregate_metrics",
    "skyrl_gym.tools.core": "tool ToolGroup",
}


@pytest.mark.parametrize("path", PROMISED)
def test_a_promised_path_offers_its_names(path):
    module = importlib.import_module(path)
    missing = [name for name in PROMISED[path].split() if not hasattr(module, name)]
    assert missing == []


@pytest.mark.parametrize(
    "path",
    [
        "skyrl.train.config",
        "skyrl.train.utils",
        "skyrl.train.utils.utils",
        "skyrl.backends.skyrl_train.utils.ppo_utils",
    ],
)
def test_a_facade_lists_what_it_offers(path):
    module = importlib.import_module(path)
    assert set(PROMISED[path].split()) <= set(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_every_package_folder_has_an_init_file():
    root = Path(__file__).parents[1]
    for package in (root / "skyrl", root / "skyrl-gym" / "skyrl_gym", root / "skycap" / "src" / "skycap"):
        folders = {path.parent for path in package.rglob("*.py")}
        assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_readmes_commands_exist():
    root = Path(__file__).parents[1]
    commands = re.findall(r"(?:bash )?((?:examples|scripts)/[\w/.]+)", (root / "README.md").read_text())
    assert commands
    assert [command for command in commands if not (root / command).exists()] == []
