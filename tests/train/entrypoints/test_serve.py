import pytest

from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError, ModelLoadError
from skyrl.train.entrypoints.serve import validate_serve


def config(path: str) -> SkyRLTrainConfig:
    cfg = SkyRLTrainConfig()
    cfg.trainer.policy.model.path = path
    cfg.trainer.placement.colocate_all = False
    cfg.finalize()
    return cfg


def test_a_local_model_may_be_served(tiny_model):
    validate_serve(config(str(tiny_model)))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("engine", "run_engines_locally", False),
        ("engine", "external_proxy_url", "http://a"),
        ("engine", "external_server_urls", ["http://a"]),
        ("engine", "distributed_executor_backend", "threads"),
        ("placement", "colocate_all", True),
        ("model", "path", ""),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_key(tiny_model, section, key, value):
    cfg = config(str(tiny_model))
    target = {
        "engine": cfg.generator.inference_engine,
        "placement": cfg.trainer.placement,
        "model": cfg.trainer.policy.model,
    }[section]
    setattr(target, key, value)
    with pytest.raises(ConfigError, match=key):
        validate_serve(cfg)


def test_a_model_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="nothing"):
        validate_serve(config(str(tmp_path / "nothing")))
