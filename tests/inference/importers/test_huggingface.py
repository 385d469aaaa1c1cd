"""A Hugging Face directory becomes our artifact, and nothing in it is run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from inference.artifact import BrokenArtifact, read_manifest, verify
from inference.config import RopeScaling
from inference.importers.checkpoint import EMBEDDING, HEAD, from_bfloat16, to_bfloat16
from inference.importers.huggingface import import_huggingface

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 20_000.0,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 256,
    "tie_word_embeddings": False,
}
IM_END = 257
Weights = dict[str, npt.NDArray[Any]]


def _weights() -> Weights:
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (258, 16),
        "model.norm.weight": (16,),
        HEAD: (258, 16),
    }
    for index in range(2):
        prefix = f"model.layers.{index}."
        shapes |= {
            prefix + "input_layernorm.weight": (16,),
            prefix + "self_attn.q_proj.weight": (16, 16),
            prefix + "self_attn.k_proj.weight": (8, 16),
            prefix + "self_attn.v_proj.weight": (8, 16),
            prefix + "self_attn.o_proj.weight": (16, 16),
            prefix + "post_attention_layernorm.weight": (16,),
            prefix + "mlp.gate_proj.weight": (24, 16),
            prefix + "mlp.up_proj.weight": (24, 16),
            prefix + "mlp.down_proj.weight": (16, 24),
        }
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>"), AddedToken("<|im_end|>")])
    return tokenizer


@dataclass
class Checkpoint:
    """A model directory to change before it is imported."""

    path: Path
    root: Path

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file."""
        (self.path / name).write_text(json.dumps(value))

    def configure(self, **changes: Any) -> None:
        """Write ``config.json`` with changes; None removes a field."""
        config = CONFIG | changes
        self.write_json("config.json", {k: v for k, v in config.items() if v is not None})

    def save(self, weights: Weights, name: str = "model.safetensors") -> None:
        """Write a weights file."""
        save_file(weights, self.path / name, metadata={"format": "pt"})

    def run(self, dtype: str = "float32") -> Path:
        """Import it."""
        return import_huggingface(self.path, self.root, dtype=dtype)

    def refusal(self) -> BrokenArtifact:
        """Why the import is refused; it leaves nothing behind."""
        with pytest.raises(BrokenArtifact) as caught:
            self.run()
        assert not list(self.root.glob("*"))
        return caught.value


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A valid directory."""
    (tmp_path / "model").mkdir()
    checkpoint = Checkpoint(tmp_path / "model", tmp_path / "root")
    checkpoint.configure()
    checkpoint.save(_weights())
    _tokenizer().save(str(checkpoint.path / "tokenizer.json"))
    return checkpoint


def _stored(artifact: Path) -> Weights:
    with safe_open(artifact / "model.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def _stored_bits(artifact: Path, name: str) -> npt.NDArray[np.uint16]:
    raw = (artifact / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8 : 8 + length])[name]
    assert entry["dtype"] == "BF16"
    start, end = (8 + length + offset for offset in entry["data_offsets"])
    return np.frombuffer(raw[start:end], np.uint16).reshape(entry["shape"])


def test_the_weights_are_stored_under_their_names(checkpoint: Checkpoint) -> None:
    artifact = checkpoint.run("float32")

    stored, weights = _stored(artifact), _weights()
    assert stored.keys() == weights.keys()
    for name, weight in weights.items():
        assert np.array_equal(stored[name], weight), name
    manifest = verify(artifact)
    assert manifest.num_parameters == sum(weight.size for weight in weights.values())
    assert (manifest.quantization, manifest.stored_dtype) == ("none", "float32")
    assert manifest.source["format"] == "huggingface"
    assert manifest.source["name"] == "model"


def test_half_precision_is_converted_through_float32(checkpoint: Checkpoint) -> None:
    halves = {name: weight.astype(np.float16) for name, weight in _weights().items()}
    checkpoint.save(halves)

    artifact = checkpoint.run("bfloat16")

    for name, half in halves.items():
        expected = to_bfloat16(half.astype(np.float32))
        assert np.array_equal(_stored_bits(artifact, name), expected), name


def test_the_shape_is_read_from_the_configuration(checkpoint: Checkpoint) -> None:
    model = read_manifest(checkpoint.run()).model

    assert (model.hidden_size, model.intermediate_size, model.num_layers) == (16, 24, 2)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (4, 2, 4)
    assert (model.vocab_size, model.context_length, model.bos_token_id) == (258, 64, 256)
    assert (model.rms_norm_eps, model.rope_theta) == (1e-6, 20_000.0)
    assert model.rope_scaling is None


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("changes", "scaling", "theta"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeScaling("linear", 2.0), 20_000.0),
        (
            {"rope_scaling": {"rope_type": "llama3", "type": "yarn", **LLAMA3}},
            RopeScaling("llama3", 8.0, 1.0, 2.0, 32),
            20_000.0,
        ),
        (
            {
                "rope_theta": None,
                "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
            },
            RopeScaling("llama3", 8.0, 1.0, 2.0, 32),
            5e5,
        ),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
            None,
            3e4,
        ),
    ],
)
def test_rope_is_read_in_the_old_and_the_new_spelling(
    checkpoint: Checkpoint, changes: dict[str, Any], scaling: RopeScaling | None, theta: float
) -> None:
    checkpoint.configure(**changes)

    model = read_manifest(checkpoint.run()).model

    assert model.rope_scaling == scaling
    assert model.rope_theta == theta


def test_shards_are_joined_by_their_index(checkpoint: Checkpoint) -> None:
    weights = _weights()
    names = sorted(weights)
    shards = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    (checkpoint.path / "model.safetensors").unlink()
    for shard, held in shards.items():
        checkpoint.save({name: weights[name] for name in held}, shard)
    index = {name: shard for shard, held in shards.items() for name in held}
    checkpoint.write_json("model.safetensors.index.json", {"weight_map": index})

    stored = _stored(checkpoint.run())

    assert all(np.array_equal(stored[name], weights[name]) for name in names)


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ({}, "weight_map"),
        ({"a": "../model.safetensors"}, "is no file of the directory"),
        ({"a": "/etc/passwd"}, "is no file of the directory"),
        ({"a": "gone.safetensors"}, "is no file of the directory"),
        ({"a": 3}, "is no file of the directory"),
        ({"a": "one.safetensors"}, "does not hold it|does not place it"),
    ],
)
def test_an_index_that_lies_is_refused(
    checkpoint: Checkpoint, weight_map: dict[str, Any], named: str
) -> None:
    (checkpoint.path / "model.safetensors").rename(checkpoint.path / "one.safetensors")
    checkpoint.write_json("model.safetensors.index.json", {"weight_map": weight_map})

    with pytest.raises(BrokenArtifact, match=named):
        checkpoint.run()


def test_a_file_and_an_index_together_are_refused(checkpoint: Checkpoint) -> None:
    checkpoint.write_json("model.safetensors.index.json", {"weight_map": {}})

    assert "both are there" in str(checkpoint.refusal())


def test_without_a_head_the_model_is_tied_whatever_it_says(checkpoint: Checkpoint) -> None:
    weights = _weights()
    del weights[HEAD]
    checkpoint.save(weights)

    manifest = read_manifest(checkpoint.run())

    assert manifest.model.tie_word_embeddings
    assert manifest.num_parameters == sum(weight.size for weight in weights.values())


def test_an_equal_head_of_a_tied_model_is_left_out(checkpoint: Checkpoint) -> None:
    weights = _weights()
    checkpoint.save(weights | {HEAD: weights[EMBEDDING]})
    checkpoint.configure(tie_word_embeddings=True)

    artifact = checkpoint.run()

    assert read_manifest(artifact).model.tie_word_embeddings
    assert HEAD not in _stored(artifact)


def test_a_tied_model_with_another_head_is_refused(checkpoint: Checkpoint) -> None:
    checkpoint.configure(tie_word_embeddings=True)

    refusal = checkpoint.refusal()

    assert "tie_word_embeddings" in str(refusal)
    assert HEAD in str(refusal)


def test_saved_rotary_frequencies_are_left_out(checkpoint: Checkpoint) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    checkpoint.save(_weights() | {name: np.ones(2, np.float32)})

    assert name not in _stored(checkpoint.run())


@pytest.mark.parametrize(
    ("generation", "template", "expected"),
    [
        (None, None, (256,)),
        ({"eos_token_id": [IM_END, 256]}, None, (IM_END, 256)),
        ({"eos_token_id": IM_END}, None, (IM_END, 256)),
        (None, "{{ m }}<|im_end|>", (256, IM_END)),
    ],
)
def test_every_end_of_an_answer_is_known(
    checkpoint: Checkpoint,
    generation: dict[str, Any] | None,
    template: str | None,
    expected: tuple[int, ...],
) -> None:
    if generation is not None:
        checkpoint.write_json("generation_config.json", generation)
    if template is not None:
        (checkpoint.path / "chat_template.jinja").write_text(template)

    assert read_manifest(checkpoint.run()).model.eos_token_ids == expected


def test_generation_defaults_are_taken_over(checkpoint: Checkpoint) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "do_sample": True, "max_length": 9}
    checkpoint.write_json("generation_config.json", generation)

    defaults = read_manifest(checkpoint.run()).generation_defaults

    assert defaults == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("chat_template.jinja", "A"),
        ("tokenizer_config.json", "A"),
        (
            "tokenizer_config.json",
            [{"name": "tool", "template": "B"}, {"name": "default", "template": "A"}],
        ),
    ],
)
def test_the_chat_template_is_found_where_it_may_be(
    checkpoint: Checkpoint, where: str, value: Any
) -> None:
    if where.endswith(".jinja"):
        (checkpoint.path / where).write_text(value)
        checkpoint.write_json("tokenizer_config.json", {"chat_template": "older"})
    else:
        checkpoint.write_json(where, {"chat_template": value})

    assert (checkpoint.run() / "chat_template.jinja").read_text() == "A"


@pytest.mark.parametrize(
    ("changes", "named", "code"),
    [
        ({"architectures": ["QwenForCausalLM"]}, "architectures", "unsupported_model"),
        ({"architectures": None}, "architectures", "unsupported_model"),
        ({"hidden_act": "gelu"}, "hidden_act", "unsupported_model"),
        ({"attention_bias": True}, "attention_bias", "unsupported_model"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "unsupported_model"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type: 'yarn'", "unsupported_model"),
        ({"rope_scaling": "linear"}, "rope_scaling", "unsupported_model"),
        ({"rope_scaling": {"type": "linear"}}, "factor", "broken_artifact"),
        ({"auto_map": {"AutoModel": "m.M"}}, "auto_map", "unsafe_artifact"),
        ({"hidden_size": None}, "hidden_size", "broken_artifact"),
        ({"hidden_size": "16"}, "hidden_size", "broken_artifact"),
        ({"hidden_size": True}, "hidden_size", "broken_artifact"),
        ({"num_attention_heads": 0}, "num_heads", "broken_artifact"),
        ({"num_hidden_layers": 10**9}, "num_layers", "broken_artifact"),
        ({"max_position_embeddings": 10**12}, "context_length", "broken_artifact"),
        ({"rms_norm_eps": 0}, "rms_norm_eps", "broken_artifact"),
        ({"vocab_size": 300}, EMBEDDING, "broken_artifact"),
        ({"num_hidden_layers": 3}, "model.layers.2", "broken_artifact"),
        ({"num_hidden_layers": 1}, "model.layers.1", "unsupported_model"),
        ({"eos_token_id": None}, "eos_token_id", "broken_artifact"),
        ({"eos_token_id": 258}, "eos_token_id", "broken_artifact"),
        ({"eos_token_id": "x"}, "eos_token_id", "broken_artifact"),
        ({"bos_token_id": -1}, "bos_token_id", "broken_artifact"),
    ],
)
def test_a_configuration_that_is_not_ours_is_refused_by_its_field(
    checkpoint: Checkpoint, changes: dict[str, Any], named: str, code: str
) -> None:
    checkpoint.configure(**changes)

    refusal = checkpoint.refusal()

    assert named in str(refusal)
    assert refusal.code == code


def test_an_infinite_number_in_the_configuration_is_refused(checkpoint: Checkpoint) -> None:
    text = json.dumps(CONFIG).replace("20000.0", "1e999")
    (checkpoint.path / "config.json").write_text(text)

    assert "rope_theta" in str(checkpoint.refusal())


@pytest.mark.parametrize(
    ("generation", "named"),
    [
        ({"temperature": 9.0}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": "0.9"}, "top_p"),
    ],
)
def test_generation_defaults_out_of_range_are_refused(
    checkpoint: Checkpoint, generation: dict[str, Any], named: str
) -> None:
    checkpoint.write_json("generation_config.json", generation)

    assert f"generation_config.json: {named}" in str(checkpoint.refusal())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused(checkpoint: Checkpoint, value: float) -> None:
    weights = _weights()
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    checkpoint.save(weights)

    assert "model.layers.1.mlp.up_proj.weight: it holds NaN" in str(checkpoint.refusal())


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_a_missing_weight_is_named(checkpoint: Checkpoint, name: str) -> None:
    weights = _weights()
    del weights[name]
    checkpoint.save(weights)

    assert f"{name}: missing" in str(checkpoint.refusal())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "modeling_llama.py"])
def test_a_model_beside_pickles_or_code_is_refused_whole(checkpoint: Checkpoint, name: str) -> None:
    (checkpoint.path / name).write_bytes(b"")

    assert name in str(checkpoint.refusal())


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_a_request_for_remote_code_is_refused_in_every_file(
    checkpoint: Checkpoint, name: str
) -> None:
    checkpoint.write_json(name, {"auto_map": {"AutoTokenizer": ["t.T", None]}})

    assert checkpoint.refusal().code == "unsafe_artifact"


def test_weights_linked_within_the_directory_are_read(checkpoint: Checkpoint) -> None:
    (checkpoint.path / "blobs").mkdir()
    (checkpoint.path / "model.safetensors").rename(checkpoint.path / "blobs" / "abc")
    (checkpoint.path / "model.safetensors").symlink_to("blobs/abc")

    verify(checkpoint.run())


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(checkpoint: Checkpoint, name: str) -> None:
    (checkpoint.path / name).unlink()

    assert name in str(checkpoint.refusal())


def test_the_same_model_is_imported_to_the_same_place(checkpoint: Checkpoint) -> None:
    assert checkpoint.run() == checkpoint.run()


@pytest.mark.slow
def test_what_transformers_saves_is_imported_exactly(checkpoint: Checkpoint) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16)
    (checkpoint.path / "model.safetensors").unlink()
    model.save_pretrained(checkpoint.path, max_shard_size="10KB")
    assert (checkpoint.path / "model.safetensors.index.json").exists()

    artifact = checkpoint.run("bfloat16")

    for name, weight in model.state_dict().items():
        ours = from_bfloat16(_stored_bits(artifact, name))
        assert np.array_equal(ours, weight.float().numpy()), name
