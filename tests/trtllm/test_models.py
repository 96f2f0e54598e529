"""Networks of TensorRT-LLM with scores in them, walked with torch, against the same model on the torch host."""

import importlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bpkv_trt.core.attention import attention_weights
from bpkv_trt.core.deletion import singleton_scores
from bpkv_trt.core.readout import DirectReadout, final_readout
from bpkv_trt.core.topk import topk_distribution
from bpkv_trt.errors import BpkvError, ConfigError, ModelError
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.runtime.step import Chunk
from bpkv_trt.trtllm.scoring_inputs import most_rows
from bpkv_trt.trtllm.settings import VARIABLE
from tests.trtllm.built_network import (
    BUNDLE,
    MODULES,
    PAGE,
    POSITIONS,
    PROMPTS,
    SHA256,
    Built,
    K,
    engine_settings,
    prepare,
)
from tests.trtllm.stock import connected_outputs


def feed(table, lengths, contexts, tokens, positions, rows, offsets, addresses, *, generation):
    """Of one step; rows: the scoring ones among the packed tokens."""
    counts = torch.tensor([len(own) for own in tokens])
    packed = [token for own in tokens for token in own]
    weights = torch.ones(len(rows))
    for start, end in zip(offsets, offsets[1:], strict=False):
        weights[start:end] /= max(end - start, 1)

    def ints(values):
        return torch.tensor(values, dtype=torch.int32)

    return {
        "input_ids": ints(packed),
        "position_ids": ints(positions),
        "last_token_ids": counts.cumsum(0).int(),
        "kv_cache_block_offsets": table,
        "sequence_length": ints(lengths),
        "context_lengths": ints(contexts),
        "host_request_types": ints([int(generation)] * len(lengths)),
        "bpkv_score_rows": ints(rows),
        "bpkv_score_offsets": ints(offsets),
        "bpkv_score_weights": weights,
        "bpkv_pool_pointers": addresses,
    }


def prefill(built, table, scored=POSITIONS):
    lengths = [len(prompt) for prompt in PROMPTS]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    rows = [row for end in ends for row in range(end - scored, end)]
    positions = [position for length in lengths for position in range(length)]
    offsets = [scored * index for index in range(len(PROMPTS) + 1)]
    return feed(table, lengths, lengths, PROMPTS, positions, rows, offsets, built.memory.addresses, generation=False)


def expected(host, sequence, count):
    """What the core makes of a sequence's last positions on the torch host: scores, each with the error of fp32."""
    replay = host.replay(sequence, count)
    top = topk_distribution(replay.logits, K, host.traits.vocabulary)
    readout = DirectReadout.of(replay.context, replay.residual, top.ids, top.p, host.traits, host.weights)
    group = host.traits.group
    scores = {}
    for layer, g in readout:
        for head in range(host.traits.kv_heads):
            rows = np.arange(host.pool.lengths(sequence)[layer, head])
            k, v = host.pool.gather(sequence, layer, np.full(len(rows), head), rows)
            columns = slice(head * group, (head + 1) * group)
            a = attention_weights(replay.q[layer][:, columns], k, host.traits.attention_scale)
            own = singleton_scores(a, replay.context[layer][:, columns], v, g[:, :, columns], readout.divergence)
            scores[layer, head] = own, 2e-5 * own / (1 - a.amax((0, 1))) + 1e-6 * own.max()
    return replay, top, scores


def check(outputs, host, sequences, offsets, ranks=1, rank=0):
    """Every output of the network is what the host and the core say; of several ranks, of this one's heads."""
    heads, kv_heads = host.traits.query_heads // ranks, host.traits.kv_heads // ranks
    own_heads = slice(rank * heads, (rank + 1) * heads)
    for index, sequence in enumerate(sequences):
        span = slice(offsets[index], offsets[index + 1])
        replay, top, scores = expected(host, sequence, span.stop - span.start)
        for layer in range(host.traits.layers):
            close(outputs[f"bpkv_q_{layer}"][span], replay.q[layer][:, own_heads])
            close(outputs[f"bpkv_context_{layer}"][span], replay.context[layer][:, own_heads])
        close(outputs["bpkv_residual"][span], replay.residual)
        assert outputs["bpkv_topk_ids"][span].tolist() == top.ids.tolist()
        close(outputs["bpkv_topk_p"][span], top.p)
        close(outputs["bpkv_covered_mass"][span], top.covered_mass)
        final = final_readout(replay.residual, top.ids, top.p, host.traits, host.weights)
        close(outputs["bpkv_readout"][span], final * host.traits.residual_multiplier)
        for layer in range(host.traits.layers):
            for head in range(kv_heads):
                (own, allowed), got = (
                    scores[layer, rank * kv_heads + head],
                    outputs[f"bpkv_scores_{layer}"][index, head],
                )
                assert ((got[: len(own)] - own).abs() <= allowed).all() and (own > 0).all()
                assert (got[len(own) :] == 0).all()


def close(given, truth):
    assert (given - truth).abs().max() <= 2e-5 * truth.abs().max()


def hosted(built):
    """The prompts, run on the torch host."""
    host = built.host()
    sequences = [host.admit() for _ in PROMPTS]
    logits = host.forward([Chunk(sequence, prompt) for sequence, prompt in zip(sequences, PROMPTS, strict=True)])
    return host, sequences, logits


@pytest.mark.parametrize("name", ["llama", "llama_bias_rope", "mistral", "qwen2", "qwen3"])
def test_a_prompts_scores_are_the_cores(trt, tensorrt_10, monkeypatch, name):
    built = Built(trt, tensorrt_10, name).build(monkeypatch)
    outputs = built.stock.outputs(prefill(built, built.tables()))
    host, sequences, logits = hosted(built)
    close(outputs["logits"], logits)
    check(outputs, host, sequences, [0, POSITIONS, 2 * POSITIONS])


@pytest.mark.parametrize("name", ["llama_bias_rope", "qwen3"])
def test_after_an_eviction_queries_and_keys_turn_by_their_logical_positions(trt, tensorrt_10, monkeypatch, name):
    built = Built(trt, tensorrt_10, name).build(monkeypatch)
    table, traits = built.tables(), built.loaded.traits
    built.stock.outputs(prefill(built, table))
    host, sequences, _ = hosted(built)
    gone = [5, 2]  # of each sequence; every head another set
    for index, sequence in enumerate(sequences):
        length = len(PROMPTS[index])
        chances = torch.rand(traits.layers, traits.kv_heads, length)
        chances[..., -1] = 2
        evict = chances.argsort(-1).argsort(-1) < gone[index]
        host.pool.apply(CompactionPlan.from_eviction(host.pool.view(sequence), evict))
        for layer in range(traits.layers):
            k, v = (
                torch.stack([rows[~evict[layer, head]] for head, rows in enumerate(each)], 1)
                for each in built.memory.rows(table, layer, index, length)
            )
            nothing = torch.full((length, *k.shape[1:]), torch.nan)
            built.memory.write(table, layer, index, 0, nothing, nothing)
            built.memory.write(table, layer, index, 0, k, v)
    contexts = [len(prompt) for prompt in PROMPTS]
    lengths = [context - count + 1 for context, count in zip(contexts, gone, strict=True)]
    tokens = [[4], [13]]
    step = feed(table, lengths, contexts, tokens, contexts, [0, 1], [0, 1, 2], built.memory.addresses, generation=True)
    outputs = built.stock.outputs(step)
    close(
        outputs["logits"], host.forward([Chunk(sequence, own) for sequence, own in zip(sequences, tokens, strict=True)])
    )
    check(outputs, host, sequences, [0, 1, 2])


def test_a_step_without_scoring_rows_computes_the_logits_alone(trt, tensorrt_10, monkeypatch):
    built = Built(trt, tensorrt_10, "llama").build(monkeypatch)
    outputs = built.stock.outputs(prefill(built, built.tables(), scored=0))
    close(outputs["logits"], hosted(built)[2])
    traits = built.loaded.traits
    shapes = {name: tuple(value.shape) for name, value in outputs.items() if name.startswith("bpkv_")}
    layers = {f"bpkv_scores_{layer}": (2, traits.kv_heads, 0) for layer in range(traits.layers)}
    for name in ("q", "context"):
        layers |= {f"bpkv_{name}_{layer}": (0, traits.query_heads, traits.head_dim) for layer in range(traits.layers)}
    once = {"topk_ids": (0, K), "topk_p": (0, K), "covered_mass": (0,), "residual": (0, traits.width)}
    once |= {"readout": (0, K, traits.width)}
    assert shapes == layers | {f"bpkv_{name}": shape for name, shape in once.items()}


def test_the_plugin_turns_nothing_and_keeps_its_kernels_for_rope(trt, tensorrt_10, monkeypatch):
    built = Built(trt, tensorrt_10, "llama_bias_rope").build(monkeypatch)
    walk = built.stock.walk(prefill(built, built.tables()))
    assert [call["layer_idx"] for call in built.stock.attention_calls] == [0, 1]
    for call in built.stock.attention_calls:
        assert call["position_embedding_type"].name == "rope_gpt_neox"
        assert (call["rotary_embedding_scale_type"].name, call["rotary_embedding_scale"]) == ("none", 1.0)
        assert call["rotary_embedding_dim"] == 16
        assert (walk[call["rotary_inv_freq"].trt_tensor] == 0).all()
        table = walk[call["rotary_cos_sin"].trt_tensor]
        assert table.shape == (1, 128 * 16) and table.dtype == torch.float32
        assert (table.view(-1, 2) == torch.tensor([1.0, 0.0])).all()


def test_inputs_have_the_ranges_of_the_build(trt, tensorrt_10, monkeypatch):
    built = Built(trt, tensorrt_10, "llama").build(monkeypatch, max_batch_size=7)
    profiles = {name: profile for name, profile in built.stock.profiles.items() if name.startswith("bpkv_")}
    assert {name: list(profile.values()) for name, profile in profiles.items()} == {
        "bpkv_score_rows": [[[0, POSITIONS, 7 * POSITIONS]]],
        "bpkv_score_offsets": [[[2, 5, 8]]],
        "bpkv_score_weights": [[[0, POSITIONS, 7 * POSITIONS]]],
        "bpkv_pool_pointers": [[1], [2]],
    }
    assert list(profiles["bpkv_score_rows"]) == list(profiles["bpkv_score_weights"])  # one size, for TensorRT too
    stock = {name for profile in built.stock.profiles.values() for name in profile if profile not in profiles.values()}
    assert not stock & {name for profile in profiles.values() for name in profile}


@pytest.mark.parametrize(
    ("sequences", "tokens", "rows"),
    [(4, 8192, 32), (2048, 8192, 1035), (2048, 512, 512), (1, 4, 8)],
)
def test_rows_of_a_step_are_as_many_as_memory_allows(sequences, tokens, rows):
    """Llama-3.1-8B: 4 (128256 + 32 4096) bytes a row, and 1 GiB."""
    sizes = {"logits": 128256, "readout": 32 * 4096}
    assert most_rows(sequences=sequences, positions=8, tokens=tokens, **sizes) == rows


def test_every_layer_has_a_plugin_and_the_first_carries_the_kernels(trt, tensorrt_10, monkeypatch):
    built = Built(trt, tensorrt_10, "qwen3").build(monkeypatch)
    plugins = [layer for layer in built.stock.opaque.added if layer.name]
    assert [layer.name for layer in plugins] == ["bpkv/score/layer_0", "bpkv/score/layer_1"]
    fields = [layer.plugin.fields for layer in plugins]
    assert [int(each["layer_in_pool"][0]) for each in fields] == [0, 1]
    assert [each.get("kernels", b"") == BUNDLE for each in (bytes_of(each) for each in fields)] == [True, False]
    for each in fields:
        numbers = {name: each[name][0] for name in ("query_heads", "kv_heads", "head_dim", "tokens_per_block")}
        assert numbers == {"query_heads": 4, "kv_heads": 2, "head_dim": 16, "tokens_per_block": PAGE}
        assert (each["top_k"][0], each["positions"][0], each["pool"][0]) == (K, POSITIONS, 0)
        assert (each["scale"][0], each["key_scale"][0], each["value_scale"][0]) == (0.25, 1.0, 1.0)
        assert bytes_of(each)["cache"] == b"fp32"


def bytes_of(fields):
    return {name: data.tobytes() for name, data in fields.items()}


@pytest.mark.parametrize("algorithm", ["FP8", "INT8"])
def test_a_quantised_cache_gives_its_factor_to_the_plugin(trt, tensorrt_10, monkeypatch, algorithm):
    built = Built(trt, tensorrt_10, "llama", quantization={"kv_cache_quant_algo": algorithm})
    with built.imported(monkeypatch) as models:
        model = built.construct(models)
        for layer, module in enumerate(model.transformer.layers):
            module.attention.kv_cache_scaling_factor = built.stock.parameter(torch.tensor([0.25 + layer]))
        model(**model.prepare_inputs(**prepare()))
        fields = [layer.plugin.fields for layer in built.stock.opaque.added if layer.name]
        assert [(each["key_scale"][0], each["value_scale"][0]) for each in fields] == [(0.25, 0.25), (1.25, 1.25)]
        assert bytes_of(fields[0])["cache"] == {"FP8": b"fp8e4m3", "INT8": b"int8"}[algorithm]
        assert built.stock.fakes.unverified == {"tensorrt_llm.parameter.Parameter.is_inited"}


def test_a_quantised_cache_without_a_factor_is_refused(trt, tensorrt_10, monkeypatch):
    built = Built(trt, tensorrt_10, "llama", quantization={"kv_cache_quant_algo": "FP8"})
    with built.imported(monkeypatch) as models:
        model = built.construct(models)
        inputs = model.prepare_inputs(**prepare())
        with pytest.raises(ConfigError, match="no kv_cache_scaling_factor for layer 0.*calibration"):
            model(**inputs)
        empty = built.stock.fakes["tensorrt_llm.parameter.Parameter"](value=None)
        with pytest.raises(ConfigError, match="layer 7"):
            importlib.import_module(MODULES[1]).cache_scale(7, SimpleNamespace(kv_cache_scaling_factor=empty))


@pytest.mark.parametrize("name", ["llama_bias_rope", "qwen3"])
def test_every_rank_scores_its_own_heads(trt, tensorrt_10, monkeypatch, name):
    ranks = [Built(trt, tensorrt_10, name, ranks=2, rank=rank).build(monkeypatch) for rank in range(2)]
    table = ranks[0].tables()
    outputs = connected_outputs([built.stock for built in ranks], [prefill(built, table) for built in ranks])
    host, sequences, logits = hosted(ranks[0])
    close(torch.cat([each["logits"] for each in outputs], -1), logits)
    for rank, own in enumerate(outputs):
        check(own, host, sequences, [0, POSITIONS, 2 * POSITIONS], 2, rank)


def test_ranks_exchange_fp32_whatever_the_engines_type(trt, tensorrt_10, monkeypatch):
    """TensorRT-LLM casts to the type of its NCCL plugin before it sends: bf16 would round the ids of tokens."""
    built = Built(trt, tensorrt_10, "llama", ranks=2)
    built.stock.plugin_config.nccl_plugin = "bfloat16"
    built.build(monkeypatch)
    sent = [(each.kind, tuple(each.sent.shape), each.dtype) for each in built.stock.exchanges if each.kind != "sum"]
    assert sent == [("allgather", (-1, 2 * K + 1), "float32"), ("allreduce", (-1, K, 32), "float32")]
    assert built.stock.plugin_config.nccl_plugin == "bfloat16"


@pytest.mark.parametrize("rows", [0, 6])
def test_an_engine_of_half_types_builds_for_any_number_of_rows(trt, tensorrt_10, monkeypatch, rows):
    """TensorRT-RTX checks types and shapes at the usual sizes; plugins' outputs are inputs of it."""
    built = Built(trt, tensorrt_10, "qwen3", dtype=torch.float16).build(monkeypatch)
    tokens, batch, usual = (1, 18, 64), (1, 2, 4), (0, rows, 4 * POSITIONS)
    sizes = {"input_ids": tokens, "position_ids": tokens, "bpkv_score_rows": usual, "bpkv_score_weights": usual}
    sizes |= dict.fromkeys(("last_token_ids", "sequence_length", "context_lengths", "host_request_types"), batch)
    sizes |= {"bpkv_score_offsets": (2, 3, 5), "kv_cache_block_offsets/0": (1, 1, 1), "kv_cache_block_offsets/1": batch}
    sizes |= {"kv_cache_block_offsets/3": (1, 4, 32)}
    for layer in built.stock.opaque.added:
        scores = {f"{layer.given.name}/0": batch, f"{layer.given.name}/2": (0, 16 if rows else 0, 128)}
        sizes |= scores if layer.name else {layer.given.name: tokens}
    engine = built.stock.build(sizes)
    assert engine is not None
    assert all(tensor.name.encode() in engine for tensor in built.stock.marked())
    halves = {tensor.name for tensor in built.stock.marked() if tensor.dtype == trt.float16}
    assert halves == {"bpkv_residual"} | {f"bpkv_{name}_{layer}" for name in ("q", "context") for layer in range(2)}


def test_only_the_names_known_of_1_x_are_relied_on(trt, tensorrt_10, monkeypatch):
    built = Built(trt, tensorrt_10, "llama", ranks=2).build(monkeypatch)
    assert built.stock.fakes.unverified == set()


REFUSED_ATTENTION = {
    "learned_absolute": ({"position_embedding_type": "learned_absolute"}, "position embedding is learned_absolute"),
    "rope_gptj": ({"position_embedding_type": "rope_gptj"}, "position embedding is rope_gptj"),
    "alibi": ({"position_embedding_type": "alibi"}, "position embedding is alibi"),
    "relative": ({"position_embedding_type": "relative"}, "position embedding is relative"),
    "long_rope": ({"position_embedding_type": "long_rope"}, "position embedding is long_rope"),
    "mrope": ({"position_embedding_type": "mrope"}, "position embedding is mrope"),
    "dynamic": ({"rotary_embedding_scale_type": "dynamic"}, "goes by the length"),
    "partial": ({"rotary_embedding_dim": 8}, "RoPE on a part of each head"),
    "logn": ({"use_logn_scaling": True}, "logn scaling"),
    "bias": ({"relative_attention": True}, "relative attention bias"),
    "cross": ({"cross_attention": True}, "cross attention"),
    "local": ({"is_local": True}, "local attention"),
    "window": ({"attention_mask_type": "sliding_window_causal"}, "mask .sliding_window_causal"),
    "sparse": ({"attention_mask_type": "blocksparse"}, "mask .blocksparse"),
}


def spelt(built, name, value):
    """An enumeration's value by its name."""
    kinds = {
        "position_embedding_type": "PositionEmbeddingType",
        "rotary_embedding_scale_type": "RotaryScalingType",
        "attention_mask_type": "AttentionMaskType",
    }
    return getattr(built.stock.fakes[f"tensorrt_llm.functional.{kinds[name]}"], value) if name in kinds else value


@pytest.mark.parametrize(("changes", "words"), REFUSED_ATTENTION.values(), ids=REFUSED_ATTENTION)
def test_an_attention_that_is_not_plain_is_refused(trt, tensorrt_10, monkeypatch, changes, words):
    built = Built(trt, tensorrt_10, "llama")
    with built.imported(monkeypatch) as models:
        model = built.construct(models)
        for layer in model.transformer.layers:
            for name, value in changes.items():
                setattr(layer.attention, name, spelt(built, name, value))
        with pytest.raises(ConfigError, match=rf"{words}.*without --plugin bpkv"):
            model.prepare_inputs(**prepare())
    assert built.stock.network.num_inputs == 0  # nothing was begun


@pytest.mark.parametrize(
    "name", ["SmoothQuantAttention", "Fp8RowwiseAttention", "QServeAttention", "DeepseekV2Attention"]
)
def test_another_class_of_attention_is_refused_by_its_name(trt, tensorrt_10, monkeypatch, name):
    built = Built(trt, tensorrt_10, "llama")
    with built.imported(monkeypatch) as models:
        model = built.construct(models)
        last = list(model.transformer.layers)[1].attention
        last.__class__ = type(name, (type(last),), {})
        with pytest.raises(ConfigError, match=f"attention of layer 1 is a {name}"):
            model.prepare_inputs(**prepare())


@pytest.mark.parametrize(
    ("plugins", "words"),
    [
        ({"reduce_fusion": True}, "reduce_fusion is true.*no residual"),
        ({"user_buffer": True}, "user_buffer is true"),
        ({"norm_quant_fusion": True}, "norm_quant_fusion is true"),
        ({"fuse_fp4_quant": True}, "fuse_fp4_quant is true"),
        ({"multiple_profiles": True}, "multiple_profiles is true"),
        ({"streamingllm": True}, "streamingllm is true"),
        ({"remove_input_padding": False}, "remove_input_padding is false"),
        ({"paged_kv_cache": False}, "paged_kv_cache is false"),
        ({"lora_plugin": "float16"}, "lora_plugin is float16.*without adapters"),
        ({"tokens_per_block": 32}, "tokens_per_block is 32.*blocks of 4 tokens"),
    ],
)
def test_plugins_that_scores_cannot_go_with_are_refused(trt, tensorrt_10, monkeypatch, plugins, words):
    built = Built(trt, tensorrt_10, "llama")
    for name, value in plugins.items():
        setattr(built.stock.plugin_config, name, value)
    with pytest.raises(ConfigError, match=words):
        built.build(monkeypatch)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_beam_width": 2}, "max_beam_width is 2.*Give 1"),
        ({"max_draft_len": 4}, "draft tokens .*Medusa"),
        ({"speculative_decoding_draft_tokens_external": True}, "draft tokens"),
        ({"max_seq_len": 129}, "max_seq_len is 129.*table has 128 positions.*--max_seq_len 128"),
    ],
)
def test_steps_that_nothing_can_be_compacted_between_are_refused(trt, tensorrt_10, monkeypatch, options, words):
    with pytest.raises(ConfigError, match=words):
        Built(trt, tensorrt_10, "llama").build(monkeypatch, **options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": 16}, "sliding window of 16 tokens"),
        ({"output_multiplier_scale": 0.5}, "output_multiplier_scale"),
        ({"quantization": {"kv_cache_quant_algo": "NVFP4"}}, "KV cache is NVFP4"),
        ({"quantization": {"quant_algo": "W8A8_SQ_PER_CHANNEL"}}, "W8A8_SQ_PER_CHANNEL"),
    ],
)
def test_a_checkpoint_that_is_not_covered_is_refused_before_its_weights_are_read(
    trt, tensorrt_10, monkeypatch, changes, words
):
    built = Built(trt, tensorrt_10, "llama", **changes)
    with built.imported(monkeypatch) as models, pytest.raises(ModelError, match=words):
        built.construct(models)


@pytest.mark.parametrize("size", ["pp_size", "cp_size"])
def test_pipeline_and_context_parallelism_are_refused(trt, tensorrt_10, monkeypatch, size):
    built = Built(trt, tensorrt_10, "llama")
    mapping = built.stock.fakes["tensorrt_llm.mapping.Mapping"]
    built.changes["mapping"] = mapping(world_size=2, **{size: 2})
    with built.imported(monkeypatch) as models, pytest.raises(ModelError, match=f"{size} 2.*tensor parallelism"):
        built.construct(models)


def test_a_forward_pass_that_goes_by_other_ways_is_an_error(trt, tensorrt_10, monkeypatch):
    built = Built(trt, tensorrt_10, "llama")
    with built.imported(monkeypatch) as models:
        model = built.construct(models)
        inputs = model.prepare_inputs(**prepare())
        list(model.transformer.layers)[1].attention.local_layer_idx = 5
        with pytest.raises(BpkvError, match="did not call the attention plugin once for each of 2 layers"):
            model(**inputs)


def test_what_was_tapped_is_put_back_whatever_happens(trt, tensorrt_10, monkeypatch):
    built = Built(trt, tensorrt_10, "llama")
    with built.imported(monkeypatch) as models:
        stock = importlib.import_module("tensorrt_llm.layers.attention").gpt_attention
        model = built.construct(models)
        inputs = model.prepare_inputs(**prepare())
        model.transformer.vocab_embedding = None
        with pytest.raises(TypeError, match="not callable"):
            model(**inputs)
        assert importlib.import_module("tensorrt_llm.layers.attention").gpt_attention is stock
        assert "forward" not in vars(model.transformer.ln_f)


def test_settings_are_the_checkpoints_or_the_builds(trt, tensorrt_10, monkeypatch, tmp_path):
    built = Built(trt, tensorrt_10, "llama")
    with built.imported(monkeypatch) as models:
        monkeypatch.delenv(VARIABLE, raising=False)
        with pytest.raises(BpkvError, match=f"{VARIABLE} is not set"):
            models.BpkvLlamaForCausalLM(built.stock.config())
        (tmp_path / "settings.json").write_text(json.dumps(engine_settings(sinks=7).document()))
        monkeypatch.setenv(VARIABLE, str(tmp_path / "settings.json"))
        assert models.BpkvLlamaForCausalLM(built.stock.config()).config.bpkv["config"]["sinks"] == 7
        own = engine_settings(sinks=2).document()
        assert models.BpkvLlamaForCausalLM(built.stock.config(bpkv=own)).config.bpkv["config"]["sinks"] == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernels": 0}, "kernels compiled for this rank are not those"),
        ({"plugin_sha256": "1e" * 32}, "library.so is not the one"),
    ],
)
def test_another_plugin_than_the_build_began_with_is_an_error(trt, tensorrt_10, monkeypatch, changes, words):
    settings = engine_settings().model_copy(update=changes)
    with pytest.raises(BpkvError, match=words):
        Built(trt, tensorrt_10, "llama", settings=settings, library=SHA256).build(monkeypatch)


def test_every_class_can_be_named_to_another_process(trt, tensorrt_10, monkeypatch):
    built = Built(trt, tensorrt_10, "llama")
    with built.imported(monkeypatch) as models:
        stock = importlib.import_module("tensorrt_llm.models").MODEL_MAP
        assert set(models.CLASSES) <= set(stock)
        for architecture, name in models.CLASSES.items():
            made = getattr(models, name)
            assert made.__module__ == "bpkv_trt.trtllm.models" and made.__qualname__ == name
            assert issubclass(made, stock[architecture])
