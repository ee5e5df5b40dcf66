import json

import pytest
import torch

from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import DatasetError
from skyrl.train.dataset.dataloader import build_dataloader
from skyrl.train.dataset.dataset import PromptDataset
from tests.fakes.tokenizers import make_byte_tokenizer


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": [{"role": "user", "content": str(i)}]}) + "\n" for i in range(11)))
    return PromptDataset(str(path), make_byte_tokenizer(), 100)


def make_cfg(seed=1, batch=3, num_workers=0):
    cfg = SkyRLTrainConfig()
    cfg.trainer.seed, cfg.trainer.train_batch_size, cfg.trainer.eval_batch_size = seed, batch, 4
    cfg.data.dataloader.num_workers = num_workers
    return cfg


def uids(batch):
    return [item["uid"] for item in batch]


def test_training_shuffles_by_the_seed_and_drops_the_rest(dataset):
    batches = [uids(batch) for batch in build_dataloader(make_cfg(), dataset)]
    assert [len(batch) for batch in batches] == [3, 3, 3]
    again = [uids(batch) for batch in build_dataloader(make_cfg(), dataset)]
    other = [uids(batch) for batch in build_dataloader(make_cfg(seed=2), dataset)]
    assert batches == again != other
    assert len({uid for batch in batches for uid in batch}) == 9


def test_evaluation_keeps_order_and_rows(dataset):
    batches = [uids(batch) for batch in build_dataloader(make_cfg(), dataset, is_train=False)]
    assert batches == [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9", "10"]]


def test_asynchronous_training_takes_one_prompt_at_a_time(dataset):
    assert len(build_dataloader(make_cfg(), dataset, is_fully_async=True)) == 11


def epochs_of(loader, number):
    """Passes with batches; a pass that only ends a saved epoch is empty."""
    passes = []
    while len(passes) < number:
        batches = [uids(batch) for batch in loader]
        if batches:
            passes.append(batches)
    return passes


@pytest.mark.parametrize(("stop_after", "num_workers"), [(0, 0), (1, 0), (3, 0), (4, 0), (6, 0), (4, 1)])
def test_a_resumed_loader_goes_on_where_the_other_stopped_and_later_epochs_are_the_same(
    dataset, num_workers, stop_after
):
    cfg = make_cfg(num_workers=num_workers)
    flat = [batch for epoch in epochs_of(build_dataloader(make_cfg(), dataset), 3) for batch in epoch]
    assert flat[:3] != flat[3:6]
    first, seen, state = build_dataloader(cfg, dataset), 0, None
    while state is None:
        if stop_after == 0:
            state = first.state_dict()
            break
        for _ in first:
            seen += 1
            if seen == stop_after:
                state = first.state_dict()
                break
    resumed = build_dataloader(cfg, dataset)
    resumed.load_state_dict(state)
    rest = [batch for epoch in epochs_of(resumed, 3 - stop_after // 3) for batch in epoch]
    assert rest[: 9 - stop_after] == flat[stop_after:]


def test_a_state_holds_only_what_the_weights_only_reader_takes(dataset, tmp_path):
    loader = build_dataloader(make_cfg(), dataset)
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == loader.state_dict()


def test_loading_processes_give_the_same_prompts(dataset):
    here = epochs_of(build_dataloader(make_cfg(), dataset), 1)
    there = epochs_of(build_dataloader(make_cfg(num_workers=1), dataset), 1)
    assert here == there


def test_too_few_prompts_are_refused(dataset):
    with pytest.raises(DatasetError, match="11 prompts don't fill one batch of trainer"):
        build_dataloader(make_cfg(batch=16), dataset)
