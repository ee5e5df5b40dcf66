import json
import logging

import pyarrow
import pyarrow.parquet
import pytest

from skyrl.errors import DatasetError
from skyrl.train.dataset import PromptDataset, prompt_length
from skyrl.train.dataset.dataset import collate_fn
from tests.fakes.tokenizers import make_byte_tokenizer

OVERHEAD = len("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n") - (
    len("<|im_start|>") * 2 + len("<|im_end|>") - 3
)


@pytest.fixture(scope="module")
def tokenizer():
    return make_byte_tokenizer()


def row(text="hi", **columns):
    return {"prompt": [{"role": "user", "content": text}]} | columns


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def write_json(path, rows):
    path.write_text(json.dumps(rows))
    return str(path)


ROWS = [
    row("a", env_class="own", reward_spec={"ground_truth": "1"}, data_source="s"),
    row("b", env_class=None, reward_spec={"ground_truth": "2"}, data_source="t"),
]


@pytest.mark.parametrize(
    ("name", "write"), [("x.parquet", write_parquet), ("x.json", write_json), ("x.jsonl", write_jsonl)]
)
def test_every_format_gives_messages_environment_and_all_other_columns(tmp_path, tokenizer, name, write):
    dataset = PromptDataset(write(tmp_path / name, ROWS), tokenizer, 100)
    assert len(dataset) == 2
    first, second = dataset[0], dataset[1]
    assert first == (ROWS[0]["prompt"], "own", {"reward_spec": {"ground_truth": "1"}, "data_source": "s"}, "0")
    assert second[1] is None and second[3] == "1"
    assert collate_fn([first]) == dataset.collate_fn([first])
    assert dataset.collate_fn([second])[0] == {
        "prompt": ROWS[1]["prompt"],
        "env_class": None,
        "env_extras": {"reward_spec": {"ground_truth": "2"}, "data_source": "t"},
        "uid": "1",
    }


def test_several_files_follow_each_other(tmp_path, tokenizer):
    files = [write_jsonl(tmp_path / "a.jsonl", [row("1"), row("2")]), write_parquet(tmp_path / "b.parquet", [row("3")])]
    dataset = PromptDataset(files, tokenizer, 100)
    assert [dataset[index][0][0]["content"] for index in range(3)] == ["1", "2", "3"]


def test_prompts_beyond_the_limit_are_dropped_and_counted(tmp_path, tokenizer, caplog):
    rows = [row("x" * length) for length in (5, 6, 7, 5)]
    dataset = PromptDataset(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, OVERHEAD + 6)
    assert [len(dataset[index][0][0]["content"]) for index in range(len(dataset))] == [5, 6, 5]
    assert dataset.token_lengths == [OVERHEAD + 5, OVERHEAD + 6, OVERHEAD + 5]
    assert dataset[2][3] == "2"  # uids count what is kept
    assert "dropped 1 of 4 prompts, longer than trainer.max_prompt_length" in caplog.text


def test_template_variables_count(tmp_path):
    tokenizer = make_byte_tokenizer("strips_thinking")
    path = write_jsonl(tmp_path / "a.jsonl", [row("x")])
    plain = PromptDataset(path, tokenizer, 100)
    quiet = PromptDataset(path, tokenizer, 100, chat_template_kwargs={"enable_thinking": False})
    assert quiet.token_lengths[0] - plain.token_lengths[0] == len("<think>\n\n</think>\n\n")


def test_rows_with_images_are_not_measured(tmp_path, tokenizer):
    content = [{"type": "text", "text": "x" * 500}, {"type": "image_url", "image_url": {"url": "data:"}}]
    dataset = PromptDataset(write_jsonl(tmp_path / "a.jsonl", [row(content)]), tokenizer, 10)
    assert dataset.token_lengths == [None]


def test_large_data_is_measured_in_processes_with_the_same_result(tmp_path, tokenizer, monkeypatch):
    rows = [row("x" * (index % 9)) for index in range(2500)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    alone = PromptDataset(path, tokenizer, OVERHEAD + 5, num_workers=0)
    monkeypatch.setattr(prompt_length, "SMALL_DATA", 100)
    together = PromptDataset(path, tokenizer, OVERHEAD + 5, num_workers=2)
    assert together.token_lengths == alone.token_lengths and len(alone) == sum(index % 9 <= 5 for index in range(2500))


def test_other_columns_can_be_named(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": row()["prompt"], "where": "own"}])
    assert PromptDataset(path, tokenizer, 100, prompt_key="question", env_class_key="where")[0][1] == "own"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(), {"question": "x"}], r"a\.jsonl, row 2, column 'prompt': missing; the row has \['question'\]"),
        ([row(), {"prompt": "x"}], "row 2, column 'prompt': must be a list of messages, not str"),
        ([{"prompt": None}], "row 1, column 'prompt': must be a list of messages, not NoneType"),
        ([{"prompt": []}], "row 1, column 'prompt': holds no messages"),
        ([{"prompt": ["x"]}], "row 1, column 'prompt': message 1 must be an object"),
        ([{"prompt": [{"content": "x"}]}], "row 1, column 'prompt': message 1 has no role"),
        ([{"prompt": [{"role": "user", "content": None}]}], "row 1, column 'prompt': message 1 has no content"),
        ([row(env_class=3)], "row 1, column 'env_class': must be the name of an environment, not 3"),
        (["text"], "row 1: must be an object, not str"),
        ([], "there are no rows"),
        ([row("x" * 200)], "all 1 prompts are longer than trainer.max_prompt_length=100"),
    ],
)
def test_a_bad_row_is_named(tmp_path, tokenizer, rows, message):
    with pytest.raises(DatasetError, match=message):
        PromptDataset(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, 100)


def test_a_missing_column_of_a_table_is_named(tmp_path, tokenizer):
    path = write_parquet(tmp_path / "a.parquet", [{"question": "x"}])
    with pytest.raises(DatasetError, match=r"a\.parquet, row 1, column 'prompt': missing; the row has \['question'\]"):
        PromptDataset(path, tokenizer, 100)


def test_a_prompt_that_the_template_refuses_is_named(tmp_path):
    tokenizer = make_byte_tokenizer("forbids_system")
    rows = [row(), {"prompt": [{"role": "system", "content": "x"}]}]
    with pytest.raises(DatasetError, match=r"row 2, column 'prompt': the chat template refuses it.*no system message"):
        PromptDataset(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, 100)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": []}\n{"prompt"\n', r"a\.jsonl, line 2: not valid JSON"),
        ("a.json", b'[{"prompt": }]', "is not valid JSON"),
        ("a.jsonl", b"\xff\xfe", "is not UTF-8"),
        ("a.parquet", b"no parquet", "can't be read as parquet"),
    ],
)
def test_a_broken_file_is_named(tmp_path, tokenizer, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        PromptDataset(str(tmp_path / name), tokenizer, 100)


def test_a_file_that_does_not_exist_is_named(tmp_path, tokenizer):
    with pytest.raises(DatasetError, match=r"nope\.parquet does not exist; check data\.train_data"):
        PromptDataset([str(tmp_path / "nope.parquet")], tokenizer, 100)


def test_hub_data_sets_have_splits(monkeypatch, tokenizer):
    import datasets

    made = datasets.Dataset.from_list([row(text) for text in "abcd"]).select([3, 1])
    monkeypatch.setattr(datasets, "load_dataset", lambda name: datasets.DatasetDict({"train": made, "test": made}))
    dataset = PromptDataset("owner/name:test", tokenizer, 100)
    assert [dataset[index][0][0]["content"] for index in range(2)] == ["d", "b"]
    assert len(PromptDataset("owner/name", tokenizer, 100)) == 2
    with pytest.raises(ValueError, match=r"owner/name has no split 'dev'; it has \['test', 'train'\]"):
        PromptDataset("owner/name:dev", tokenizer, 100)


def test_a_name_that_the_hub_does_not_give_is_named(monkeypatch, tokenizer):
    import datasets

    def refuse(name):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DatasetError, match=r"data\.csv is neither a file"):
        PromptDataset("data.csv", tokenizer, 100)


def test_nothing_is_logged_as_dropped_when_all_fit(tmp_path, tokenizer, caplog):
    with caplog.at_level(logging.INFO):
        PromptDataset(write_jsonl(tmp_path / "a.jsonl", [row()]), tokenizer, 100)
    assert "dropped" not in caplog.text and "1 prompts" in caplog.text
