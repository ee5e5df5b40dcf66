from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import CheckpointError, ConfigError
from skyrl.train.entrypoints import launch
from skyrl.train.entrypoints.main_base import BasePPOExp

HEAVY = {"torch", "ray", "vllm", "transformers"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run a command line in this process; the controller is replaced by one that records its config."""
    configs: list[SkyRLTrainConfig] = []

    def record(main_fn, config, *, trains):
        configs.append(config)
        run_argv.trains = trains
        return main_fn(config)

    monkeypatch.setattr(launch, "run_controller", record)
    monkeypatch.setattr(launch, "configure_logging", lambda: None)
    monkeypatch.chdir(tmp_path)

    def run_argv(*argv: str, main_fn=lambda config: None, **kwargs) -> list[SkyRLTrainConfig]:
        monkeypatch.setattr(sys, "argv", ["main.py", *argv, f"trainer.log_path={tmp_path / 'logs'}"])
        launch.run_hydra(main_fn, validate=kwargs.pop("validate", lambda config: None), **kwargs)
        return configs

    return run_argv


def test_a_command_line_becomes_a_finalized_config_and_leaves_the_working_folder_alone(run, tmp_path: Path):
    (config,) = run("trainer.max_prompt_length=768", "trainer.run_name=train[:2]")
    assert config.generator.max_input_length == 768
    assert config.trainer.run_name == "train[:2]"
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_flags_between_overrides_and_presets_work(run):
    configs = run("trainer.seed=3", "-m", "+recipe=quickstart", "trainer.epochs=1,2")
    assert [(config.trainer.seed, config.trainer.epochs) for config in configs] == [(3, 1), (3, 2)]


def test_files_of_users_start_from_the_root_and_overrides_win(run, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("defaults: [skyrl_train, _self_]\ntrainer: {seed: 7, epochs: 3}\n")
    (config,) = run("--config-dir", str(tmp_path), "trainer.epochs=4", "--config-name", "mine")
    assert isinstance(config, SkyRLTrainConfig)
    assert (config.trainer.seed, config.trainer.epochs) == (7, 4)


@pytest.mark.parametrize(
    "text", ["defaults: [skyrl_train, _self_]\ntrainer: {sed: 7}\n", "defaults: [skyrl_train]\na: 1\na: 2\n"]
)
def test_an_error_in_a_file_is_the_users(run, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(SystemExit) as error:
        run("--config-dir", str(tmp_path), "--config-name", "bad")
    assert error.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_jobs_of_a_sweep_share_no_folder_and_no_name(run):
    configs = run("trainer.seed=1,2", "-m", "trainer.ckpt_path=/c/", "trainer.run_name=r", "trainer.export_path=/e")
    assert [config.trainer.ckpt_path for config in configs] == ["/c/0", "/c/1"]
    assert [config.trainer.run_name for config in configs] == ["r-0", "r-1"]
    assert [config.trainer.run_dir for config in configs] == ["/e/0/runs/r-0", "/e/1/runs/r-1"]


def test_a_swept_folder_or_one_with_the_job_number_is_left_alone(run):
    configs = run("trainer.ckpt_path=/a,/b", "-m", "trainer.export_path='/e/${hydra:job.num}'")
    assert [config.trainer.ckpt_path for config in configs] == ["/a", "/b"]
    assert [config.trainer.export_path for config in configs] == ["/e/0", "/e/1"]


def test_ctrl_c_in_a_job_ends_the_sweep_with_130(run):
    started = []

    def interrupt(config):
        started.append(config.trainer.seed)
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as error:
        run("trainer.seed=1,2", "-m", main_fn=interrupt)
    assert error.value.code == 130
    assert started == [1]


def test_a_config_error_is_one_line_and_exit_code_2(run, capsys: pytest.CaptureFixture[str]):
    def refuse(config):
        raise ConfigError("trainer.seed=3: must be even")

    for kwargs in ({"validate": refuse}, {"main_fn": refuse}):
        with pytest.raises(SystemExit) as error:
            run("trainer.seed=3", **kwargs)
        assert error.value.code == 2
        assert capsys.readouterr().err == "error: trainer.seed=3: must be even\n"


def test_every_error_of_the_library_is_one_line_and_the_log_keeps_the_traceback(run, capsys, caplog):
    def fail(config):
        raise CheckpointError("the disk is full\nfree some")

    with caplog.at_level("DEBUG"), pytest.raises(SystemExit) as error:
        run(main_fn=fail)
    assert error.value.code == 1
    assert capsys.readouterr().err == "error: the disk is full free some (LOG_LEVEL=DEBUG shows the traceback)\n"
    assert "Traceback" in caplog.text


def test_an_entry_point_says_whether_it_trains(run):
    run()
    assert run.trains
    run(trains=False)
    assert not run.trains


class OwnExp:
    """A user's experiment: it may register names when it is built, in the controller."""

    def __init__(self, config: SkyRLTrainConfig) -> None:
        self.config = config


@pytest.mark.parametrize(("main_fn", "may_follow"), [(BasePPOExp, False), (OwnExp, True), (lambda config: None, True)])
def test_only_code_of_the_users_may_register_names_later(run, monkeypatch, main_fn, may_follow: bool):
    seen = []
    monkeypatch.setattr(launch, "validate_run", lambda config, **options: seen.append(options))
    monkeypatch.setattr(launch, "run_controller", lambda main_fn, config, *, trains: None)
    run(main_fn=main_fn, validate=launch.validate_run)
    assert seen == [{"names_may_follow": True} if may_follow else {}]


@pytest.mark.parametrize(
    ("module", "ours"),
    [("skyrl.train.entrypoints.main_base", True), ("my_package.main", False), (None, False)],
)
def test_python_m_hides_no_module(monkeypatch, module: str | None, ours: bool):
    """A class of the module that runs has the module `__main__`; of a script there is no other name."""
    spec = None if module is None else ModuleSpec(module, None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert launch._is_ours(type("Exp", (), {"__module__": "__main__"})) is ours


def test_other_errors_keep_their_traceback(run):
    def fail(config):
        raise RuntimeError("our own bug")

    with pytest.raises(RuntimeError, match="our own bug"):
        run(main_fn=fail)
    assert "HYDRA_FULL_ERROR" not in os.environ


def test_another_entry_point_gets_the_rest_of_the_command_line(run, monkeypatch, tmp_path: Path):
    (tmp_path / "my_entry.py").write_text(
        "import sys\nfrom pathlib import Path\ndef main():\n    Path('argv').write_text(' '.join(sys.argv[1:]))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert run("a=1", "trainer.override_entrypoint=my_entry", "--cfg", "job") == []
    assert (tmp_path / "argv").read_text().startswith("a=1 --cfg job trainer.log_path=")


@pytest.mark.parametrize("module", ["no_such_module", "skyrl.errors"])
def test_an_entry_point_that_cannot_run_is_the_users_error(run, module: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as error:
        run(f"trainer.override_entrypoint={module}")
    assert error.value.code == 2
    assert module in capsys.readouterr().err


def start(tmp_path: Path, script: str, *argv: str) -> subprocess.Popen[str]:
    main = tmp_path / "main.py"
    main.write_text(script)
    environ = {**os.environ, "PYTHONPATH": str(Path(launch.__file__).parents[3])}
    folders = [f"trainer.{name}={tmp_path / name}" for name in ("log_path", "export_path", "ckpt_path")]
    return subprocess.Popen(
        [sys.executable, str(main), *argv, *folders],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        cwd=tmp_path,
    )


LIGHT_SCRIPT = f"""
import atexit, sys, time
from skyrl.train.entrypoints.launch import run_hydra
atexit.register(lambda: sys.stderr.write(f"heavy={{sorted({HEAVY} & set(sys.modules))}} cpu={{time.process_time()}}"))
run_hydra(lambda config: None)
"""


@pytest.mark.parametrize(
    ("argv", "code", "found"),
    [
        (["--cfg", "job"], 0, "train_batch_size: 1024"),
        (["trainer.policy.model.pth=x"], 2, "trainer.policy.model.pth; did you mean trainer.policy.model.path?"),
        (["--help"], 0, "quickstart, reinforce_pp"),
    ],
)
def test_answers_that_need_no_run_load_nothing_heavy(tmp_path: Path, argv: list[str], code: int, found: str):
    process = start(tmp_path, LIGHT_SCRIPT, *argv)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert found in out + err
    assert "heavy=[]" in err
    assert float(err.rpartition("cpu=")[2]) < 2.0


RAY_SCRIPT = """
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from skyrl.errors import DatasetError
from skyrl.train.entrypoints.launch import run_hydra

def wait(config):
    folder = Path(config.trainer.export_path)
    folder.mkdir(exist_ok=True)
    try:
        (folder / "started").touch()
        for _ in range(600):
            time.sleep(0.1)
    finally:
        (folder / "stopped").touch()

class Experiment:
    def __init__(self, config):
        self.config = config
    def run(self):
        if self.config.trainer.seed == 7:
            raise DatasetError("row 3 has no prompt")
        wait(self.config)

if __name__ == "__main__":
    run_hydra(Experiment, validate=lambda config: None)
"""


@pytest.mark.ray
def test_an_error_in_the_controller_is_told_as_its_own(tmp_path: Path):
    process = start(tmp_path, RAY_SCRIPT, "trainer.seed=7")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "error: row 3 has no prompt" in err
    assert "Traceback" not in err


@pytest.mark.ray
def test_ctrl_c_lets_the_controller_clean_up_and_exits_130(tmp_path: Path):
    process = start(tmp_path, RAY_SCRIPT)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "export_path" / "started").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 130
    assert (tmp_path / "export_path" / "stopped").exists()
