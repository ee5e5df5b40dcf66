from skyrl.backends.skyrl_train.weight_sync.proof import compare_fingerprints, merge_shards
from skyrl.types.weights import FingerprintPlan, TensorSample, TensorShard

PLAN = FingerprintPlan(version=1, samples=(TensorSample(name="a", shape=(4, 2)), TensorSample(name="b", shape=(3,))))


def record(name, digest, shard=None, via="parameter"):
    return {"name": name, "shard": shard, "via": via, "hash": digest}


def test_equal_hashes_prove():
    proof = compare_fingerprints(PLAN, {"a": "1", "b": "2"}, {"url": [[record("a", "1"), record("b", "2")]]})
    assert (proof.wrong, proof.unreadable) == ([], [])


def test_a_wrong_hash_names_tensor_server_worker_and_place():
    answers = {"url": [[record("a", "1"), record("a", "9", via="kernel"), record("b", "2")]]}
    proof = compare_fingerprints(PLAN, {"a": "1", "b": "2"}, answers)
    assert proof.wrong == ["a on url worker 0 (kernel)"]


def test_slices_are_compared_with_the_same_slice():
    expected = {"a[0:0:2]": "1", "a[0:2:4]": "2", "b": "3"}
    workers = [[record("a", "1", [0, 0, 2]), record("b", "3")], [record("a", "1", [0, 2, 4]), record("b", "3")]]
    assert compare_fingerprints(PLAN, expected, {"url": workers}).wrong == ["a on url worker 1 (parameter)"]


def test_every_server_must_account_for_every_tensor():
    answers = {"one": [[record("a", "1")], [record("b", "2")]], "two": [[record("a", "1")]]}
    assert compare_fingerprints(PLAN, {"a": "1", "b": "2"}, answers).wrong == ["b on two holds no such tensor"]


def test_unreadable_tensors_are_reported_apart():
    answers = {"url": [[record("a", "1"), {"name": "b", "unreadable": "quantised"}]]}
    proof = compare_fingerprints(PLAN, {"a": "1", "b": "2"}, answers)
    assert (proof.wrong, proof.unreadable) == ([], ["b (quantised)"])


def test_slices_of_all_workers_are_merged():
    answers = {"one": [{"a": [[0, 0, 2]], "b": [None]}, {"a": [[0, 2, 4]]}], "two": [{"a": [[0, 0, 2]]}]}
    first, second = TensorShard(dim=0, start=0, stop=2), TensorShard(dim=0, start=2, stop=4)
    assert merge_shards(answers) == {"a": (first, second), "b": (None,)}
