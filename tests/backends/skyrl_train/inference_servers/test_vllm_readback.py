"""Reading back from layers as vLLM builds them, without an engine; the whole way is in ``test_vllm_receivers``."""

import pytest
import torch
from torch import nn

from skyrl.backends.skyrl_train.weight_sync.fingerprint import fingerprint_tensor, full_plan, hash_values
from skyrl.types.weights import FingerprintPlan, TensorSample, TensorShard, fingerprint_key

pytestmark = pytest.mark.filterwarnings("ignore")  # those of importing vLLM

HIDDEN, HEAD, HEADS, KV_HEADS, MIDDLE, VOCABULARY = 16, 4, 8, 2, 24, 50


def make(cls, **attributes):
    """A layer with the attributes that its constructor would set, which wants vLLM's process groups."""
    layer = cls.__new__(cls)
    nn.Module.__init__(layer)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def packed(layer, weight, method, *, visible=False):
    """Hide the weight behind the layer's kernel, as vLLM does on a CPU."""
    layer.weight = nn.Parameter(weight if visible else torch.empty(0), requires_grad=False)
    layer.cpu_linear = lambda x, _, bias: torch.nn.functional.linear(x, weight, bias)
    layer.quant_method, layer.params_dtype = method, weight.dtype
    return layer


def part(tensor, rank, size, dim=0):
    return tensor.chunk(size, dim)[rank]


def checkpoint():
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.attn.q_proj.weight": [HEADS * HEAD, HIDDEN],
        "model.attn.k_proj.weight": [KV_HEADS * HEAD, HIDDEN],
        "model.attn.v_proj.weight": [KV_HEADS * HEAD, HIDDEN],
        "model.attn.k_proj.bias": [KV_HEADS * HEAD],
        "model.attn.o_proj.weight": [HIDDEN, HEADS * HEAD],
        "model.gate_proj.weight": [MIDDLE, HIDDEN],
        "model.up_proj.weight": [MIDDLE, HIDDEN],
        "model.norm.weight": [HIDDEN],
        "model.embed_tokens.weight": [VOCABULARY, HIDDEN],
        "lm_head.weight": [VOCABULARY, HIDDEN],
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Indices:
    def __init__(self, start, stop):
        self.org_vocab_start_index, self.org_vocab_end_index = start, stop


def worker_model(weights, rank, size):
    """What tensor-parallel worker ``rank`` of ``size`` holds."""
    from vllm.model_executor.layers import linear, vocab_parallel_embedding
    from vllm.model_executor.models.utils import WeightsMapper

    tp = {"tp_rank": rank, "tp_size": size}
    method, embedding_method = linear.UnquantizedLinearMethod(), vocab_parallel_embedding.UnquantizedEmbeddingMethod()
    replicas = max(1, size // KV_HEADS)
    kv_rank, kv_size = rank // replicas, size // replicas
    attn, model, top = nn.Module(), nn.Module(), nn.Module()

    def qkv(kind):
        names = [f"model.attn.{letter}_proj.{kind}" for letter in "qkv"]
        held = [(rank, size), (kv_rank, kv_size), (kv_rank, kv_size)]
        return torch.cat(
            [part(weights[name], *where) for name, where in zip(names, held, strict=True) if name in weights]
        )

    attn.qkv_proj = make(
        linear.QKVParallelLinear,
        num_heads=HEADS // size,
        num_kv_heads=KV_HEADS // kv_size,
        head_size=HEAD,
        v_head_size=HEAD,
        num_kv_head_replicas=replicas,
        input_size_per_partition=HIDDEN,
        **tp,
    )
    packed(attn.qkv_proj, qkv("weight"), method)
    # q has no bias in this checkpoint: its rows of the fused bias stay zero.
    kv_bias = part(weights["model.attn.k_proj.bias"], kv_rank, kv_size)
    attn.qkv_proj.bias = nn.Parameter(
        torch.cat([torch.zeros(HEADS // size * HEAD), kv_bias, torch.zeros(len(kv_bias))]), requires_grad=False
    )
    attn.o_proj = make(linear.RowParallelLinear, input_size_per_partition=HEADS * HEAD // size, **tp)
    packed(attn.o_proj, part(weights["model.attn.o_proj.weight"], rank, size, 1).contiguous(), method)
    model.gate_up_proj = make(
        linear.MergedColumnParallelLinear, output_sizes=[MIDDLE, MIDDLE], input_size_per_partition=HIDDEN, **tp
    )
    gate_up = [part(weights[f"model.{name}_proj.weight"], rank, size) for name in ("gate", "up")]
    packed(model.gate_up_proj, torch.cat(gate_up), method)
    model.norm = nn.Module()
    model.norm.weight = nn.Parameter(weights["model.norm.weight"])
    per_worker = -(-VOCABULARY // (8 * size)) * 8
    start, stop = min(rank * per_worker, VOCABULARY), min((rank + 1) * per_worker, VOCABULARY)
    for owner, name, cls in (
        (model, "embed_tokens", vocab_parallel_embedding.VocabParallelEmbedding),
        (top, "lm_head", vocab_parallel_embedding.ParallelLMHead),
    ):
        whole = weights["lm_head.weight" if name == "lm_head" else "model.embed_tokens.weight"]
        rows = torch.zeros(per_worker, HIDDEN)
        rows[: stop - start] = whole[start:stop]
        layer = make(cls, shard_indices=Indices(start, stop), embedding_dim=HIDDEN)
        setattr(owner, name, packed(layer, rows, embedding_method, visible=True))
    model.attn = attn
    top.model = model
    top.hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )
    return top


def metadata_of(weights):
    return {
        "names": list(weights),
        "dtype_names": ["float32"] * len(weights),
        "shapes": [list(tensor.shape) for tensor in weights.values()],
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_slice_of_every_worker_equals_that_of_the_checkpoint(size):
    from skyrl.backends.skyrl_train.inference_servers.vllm_readback import held_shards, read_back

    weights = checkpoint()
    plan = full_plan(metadata_of(weights), version=1)
    covered = {name: torch.zeros(tensor.shape) for name, tensor in weights.items()}
    for rank in range(size):
        model = worker_model(weights, rank, size)
        shards = held_shards(model, {name: list(tensor.shape) for name, tensor in weights.items()})
        for record in read_back(model, plan):
            name, shard = record["name"], TensorShard.from_json(record["shard"])
            assert record["shard"] in shards[name]
            sample = TensorSample(name=name, shape=tuple(weights[name].shape), shards=(shard,))
            assert record["hash"] == fingerprint_tensor(weights[name], sample)[fingerprint_key(name, shard)], name
            piece = covered[name]
            (piece if shard is None else piece.narrow(shard.dim, shard.start, shard.stop - shard.start)).fill_(1)
    assert all(bool(mask.all()) for mask in covered.values())


def test_sampled_columns_of_a_row_parallel_layer_are_those_of_its_slice():
    from skyrl.backends.skyrl_train.inference_servers.vllm_readback import read_back

    weights = checkpoint()
    name = "model.attn.o_proj.weight"
    plan = FingerprintPlan(version=1, samples=(TensorSample(name=name, shape=(HIDDEN, 32), columns=(0, 3, 17)),))
    first, second = (read_back(worker_model(weights, rank, 4), plan)[0] for rank in (0, 1))
    assert first["hash"] == hash_values(weights[name][:, [0, 3]])
    assert second["hash"] == hash_values(torch.empty(HIDDEN, 0))


def test_a_shared_embedding_is_read_as_table_and_as_operand():
    from skyrl.backends.skyrl_train.inference_servers.vllm_readback import read_back

    weights = checkpoint()
    model = worker_model(weights, 0, 1)
    model.lm_head.weight = model.model.embed_tokens.weight  # tied, but the head's packed copy is the old one
    name = "model.embed_tokens.weight"
    plan = FingerprintPlan(version=1, samples=(TensorSample(name=name, shape=(VOCABULARY, HIDDEN)),))
    records = {record["via"]: record["hash"] for record in read_back(model, plan)}
    assert records == {"parameter": hash_values(weights[name]), "kernel": hash_values(weights["lm_head.weight"])}


def test_what_cannot_be_read_says_why():
    from skyrl.backends.skyrl_train.inference_servers.vllm_readback import read_back

    model = worker_model(checkpoint(), 0, 1)
    model.model.attn.o_proj.quant_method = object()
    samples = [
        ("model.attn.o_proj.weight", (HIDDEN, 32), "quantised"),
        ("model.experts.0.weight", (2, 2), "no such layer"),
        ("model.norm.scale", (2,), "no parameter 'scale'"),
        ("model.norm.weight", (HIDDEN + 1,), r"held as"),
    ]
    plan = FingerprintPlan(version=1, samples=tuple(TensorSample(name=name, shape=shape) for name, shape, _ in samples))
    for record, (name, _, reason) in zip(read_back(model, plan), samples, strict=True):
        assert record["name"] == name
        assert reason in record["unreadable"]


def test_layers_of_other_pipeline_stages_are_left_out():
    from vllm.model_executor.models.utils import PPMissingLayer

    from skyrl.backends.skyrl_train.inference_servers.vllm_readback import read_back

    model = worker_model(checkpoint(), 0, 1)
    model.lm_head = PPMissingLayer()
    plan = FingerprintPlan(version=1, samples=(TensorSample(name="lm_head.weight", shape=(VOCABULARY, HIDDEN)),))
    assert read_back(model, plan) == []
