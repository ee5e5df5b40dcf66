from __future__ import annotations

import pytest

from skyrl.config.legacy import translate_legacy
from skyrl.errors import ConfigError

ENGINE = "generator.inference_engine"


def test_async_engine_true_is_dropped_and_anything_else_refused():
    assert translate_legacy([f"{ENGINE}.async_engine=true", "a=1"]) == ["a=1"]
    for value in ("false", "maybe"):
        with pytest.raises(ConfigError, match="async_engine"):
            translate_legacy([f"{ENGINE}.async_engine={value}"])


def test_sample_packing_becomes_its_new_name():
    with pytest.warns(DeprecationWarning, match="remove_microbatch_padding"):
        assert translate_legacy(["trainer.use_sample_packing=false"]) == ["trainer.remove_microbatch_padding=false"]


def test_both_names_of_sample_packing_are_refused():
    with pytest.raises(ConfigError, match="remove_microbatch_padding"):
        translate_legacy(["trainer.use_sample_packing=true", "trainer.remove_microbatch_padding=true"])


@pytest.mark.parametrize("name", ["enable_http_endpoint", "override_existing_update_group"])
def test_removed_keys_say_so(name: str):
    with pytest.raises(ConfigError, match="no longer supported; remove"):
        translate_legacy([f"{ENGINE}.{name}=true"])


def test_remote_urls_point_to_the_external_ones():
    with pytest.raises(ConfigError, match=r"external_proxy_url.*external_server_urls"):
        translate_legacy([f"{ENGINE}.remote_urls=['http://a']"])


PARENTS = ("trainer", "generator", ENGINE, f"{ENGINE}.engine_init_kwargs")


@pytest.mark.parametrize(
    "key",
    [f"{parent}.{name}" for parent in PARENTS for name in ("rope_scaling", "rope_theta", "rope_parameters")]
    + [f"{ENGINE}.engine_init_kwargs.hf_overrides.{name}" for name in ("rope_scaling", "rope_theta")],
)
def test_each_of_the_fourteen_rope_paths_points_to_rope_parameters(key: str):
    for token in (f"{key}=1", f"+{key}.factor=2"):
        with pytest.raises(ConfigError, match=r"hf_overrides\.rope_parameters"):
            translate_legacy([token])


def test_other_tokens_pass_untouched():
    tokens = [f"{ENGINE}.engine_init_kwargs.hf_overrides.rope_parameters={{a:1}}", "--cfg", "~a.b", "x='a=b'"]
    assert translate_legacy(tokens) == tokens
