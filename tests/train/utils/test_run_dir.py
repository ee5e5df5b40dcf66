"""A fresh run never writes into another run's folder; a resumed one goes on in its own."""

import os

from skyrl.train.utils.run_dir import prepare_run_dir, write_config


def used(path):
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    return path


def test_a_fresh_run_takes_its_folder_or_an_empty_one(tmp_path):
    path = str(tmp_path / "runs/a")
    assert prepare_run_dir(path, resumed=False) == path
    assert prepare_run_dir(path + "/", resumed=False) == path
    assert os.path.isdir(path)


def test_a_fresh_run_that_finds_the_folder_used_takes_the_next_number(tmp_path):
    for name in ("a", "a-2"):
        used(tmp_path / name)
    assert prepare_run_dir(str(tmp_path / "a"), resumed=False) == str(tmp_path / "a-3")
    assert (tmp_path / "a/metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_resumed_run_goes_on_where_its_checkpoint_says(tmp_path):
    used(tmp_path / "a")
    second = used(tmp_path / "a-2")
    assert prepare_run_dir(str(tmp_path / "a"), resumed=True, recorded=str(second)) == str(second)


def test_a_resumed_run_whose_folder_is_gone_uses_the_configured_one(tmp_path):
    path = str(tmp_path / "a")
    assert prepare_run_dir(path, resumed=True, recorded=str(tmp_path / "gone")) == path
    assert prepare_run_dir(path, resumed=True) == path
    assert os.path.isdir(path)


def test_an_earlier_config_that_differs_is_kept(tmp_path):
    for text in ("lr: 1\n", "lr: 1\n", "lr: 2\n", "lr: 3\n"):
        write_config(str(tmp_path), text)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "config.yaml": "lr: 3\n",
        "config-1.yaml": "lr: 1\n",
        "config-2.yaml": "lr: 2\n",
    }
