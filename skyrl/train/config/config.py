"""Upstream's module of the config classes; their home is ``skyrl.config``."""

from skyrl.config.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    ClipCovConfig,
    DPPOConfig,
    DynamicSamplingConfig,
    KLCovConfig,
    KLCtrlConfig,
    OffPolicyCorrectionConfig,
    SAPOConfig,
    ScoreCenteringConfig,
)
from skyrl.config.base import BaseConfig, get_config_as_dict, get_config_as_yaml_str
from skyrl.config.data import DataConfig, DataLoaderConfig
from skyrl.config.environment import (
    EnvironmentConfig,
    LLMAsAJudgeEnvConfig,
    SearchEnvConfig,
    SkyRLGymConfig,
    Text2SQLEnvConfig,
)
from skyrl.config.generator import ChatTemplateConfig, GeneratorConfig, RateLimitConfig, SamplingParams
from skyrl.config.inference_engine import DeltaWeightSyncConfig, InferenceEngineConfig
from skyrl.config.megatron import MegatronConfig, MegatronDDPConfig, MegatronHFExportConfig, MegatronLoraConfig
from skyrl.config.roles import (
    CriticConfig,
    ExpertMxfp8Config,
    FakeInt4QatConfig,
    FSDPConfig,
    MixedPrecisionConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    RefConfig,
    SkyRLLoraConfig,
    TorchProfilerConfig,
)
from skyrl.config.root import SkyRLTrainConfig, finalize, make_config
from skyrl.config.trainer import FullyAsyncConfig, MTPConfig, PlacementConfig, TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "BaseConfig",
    "CISPOConfig",
    "ChatTemplateConfig",
    "ClipCovConfig",
    "CriticConfig",
    "DPPOConfig",
    "DataConfig",
    "DataLoaderConfig",
    "DeltaWeightSyncConfig",
    "DynamicSamplingConfig",
    "EnvironmentConfig",
    "ExpertMxfp8Config",
    "FSDPConfig",
    "FakeInt4QatConfig",
    "FullyAsyncConfig",
    "GeneratorConfig",
    "InferenceEngineConfig",
    "KLCovConfig",
    "KLCtrlConfig",
    "LLMAsAJudgeEnvConfig",
    "MTPConfig",
    "MegatronConfig",
    "MegatronDDPConfig",
    "MegatronHFExportConfig",
    "MegatronLoraConfig",
    "MixedPrecisionConfig",
    "ModelConfig",
    "OffPolicyCorrectionConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "PolicyConfig",
    "RateLimitConfig",
    "RefConfig",
    "SAPOConfig",
    "SamplingParams",
    "ScoreCenteringConfig",
    "SearchEnvConfig",
    "SkyRLGymConfig",
    "SkyRLLoraConfig",
    "SkyRLTrainConfig",
    "Text2SQLEnvConfig",
    "TorchProfilerConfig",
    "TrainerConfig",
    "finalize",
    "get_config_as_dict",
    "get_config_as_yaml_str",
    "make_config",
]
