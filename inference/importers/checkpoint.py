"""What both importers share: which tensors a Llama checkpoint must hold, and how their values are stored.

Names are Hugging Face's, shapes ``[out, in]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from inference.artifact import BrokenArtifact, open_regular
from inference.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
STORED_DTYPES = {"float32": "F32", "bfloat16": "BF16"}

# Tokens that end a turn in the chat templates of the supported family. A template that writes one relies on the
# model to stop there, even where the checkpoint names only the end of a document.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")

# Sizes come from a stranger's configuration, and both are looped over or allocated by before a weight is read.
MAX_LAYERS = 1_000
MAX_CONTEXT = 2**24
MAX_TEMPLATE_BYTES = 256 * 2**10

_PIECE_BYTES = 4 * 2**20


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama checkpoint of this shape; ``lm_head.weight`` only where it is not tied."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def check_limits(file: str, config: ModelConfig) -> None:
    """Refuse a shape that no real model has, before anything is sized by it.

    Raises:
        BrokenArtifact: more layers or a longer context than we would ever serve.
    """
    for field, limit in (("num_layers", MAX_LAYERS), ("context_length", MAX_CONTEXT)):
        if (value := getattr(config, field)) > limit:
            raise BrokenArtifact(
                file, field, f"{value} is above the limit of {limit}.", "Correct it."
            )


def count_parameters(config: ModelConfig) -> int:
    """Weights of the model, a tied embedding counted once."""
    return sum(prod(shape) for shape in expected_shapes(config).values())


def check_tensors(file: str, found: Mapping[str, tuple[int, ...]], config: ModelConfig) -> None:
    """Refuse a checkpoint whose tensors are not exactly those that the model needs.

    Raises:
        BrokenArtifact: tensors are missing, unexpected, or of another shape; it names the first few.
    """
    expected = expected_shapes(config)
    if missing := sorted(expected.keys() - found.keys()):
        raise BrokenArtifact(
            file, _first(missing), "missing.", "Download or export the whole model again."
        )
    if unexpected := sorted(found.keys() - expected.keys()):
        raise BrokenArtifact(
            file,
            _first(unexpected),
            "a Llama model of this shape has no such tensor.",
            "Import a checkpoint without it (no adapters, biases or experts).",
            code="unsupported_model",
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise BrokenArtifact(
                file,
                name,
                f"its shape is {list(found[name])}, the configuration asks for {list(shape)}.",
                "Export weights and configuration from the same model.",
            )


def check_tokenizer(file: str, tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Refuse a tokenizer that can give, or a stop token that is, an id without a row in the embedding.

    Raises:
        BrokenArtifact: an id is not below ``vocab_size``, or nothing ends an answer.
    """
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if not 0 <= highest < config.vocab_size:
        raise BrokenArtifact(
            file,
            "tokenizer",
            f"its ids reach {highest}, the embedding has {config.vocab_size} rows.",
            "Export weights and tokenizer from the same model.",
        )
    bos_ids = () if config.bos_token_id is None else (config.bos_token_id,)
    for field, ids in (("eos_token_id", config.eos_token_ids), ("bos_token_id", bos_ids)):
        if not all(0 <= token_id < config.vocab_size for token_id in ids):
            raise BrokenArtifact(
                file,
                field,
                f"{list(ids)} are not all in 0..{config.vocab_size - 1}.",
                "Correct it to ids of the tokenizer.",
            )
    if not config.eos_token_ids:
        raise BrokenArtifact(
            file, "eos_token_id", "missing.", "Set it to the id of the token that ends an answer."
        )


def with_end_of_turn(
    eos_token_ids: Iterable[int], tokenizer: Tokenizer, chat_template: str | None
) -> tuple[int, ...]:
    """``eos_token_ids`` in their order, and behind them the end-of-turn tokens that the template writes."""
    written = (token for token in END_OF_TURN if token in (chat_template or ""))
    ids = [*eos_token_ids, *(tokenizer.token_to_id(token) for token in written)]
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def read_rows(
    path: Path, start: int, num_rows: int, row_bytes: int, *, multiple: int = 1
) -> Iterator[npt.NDArray[np.uint8]]:
    """The rows that begin at byte ``start``, as bytes ``[rows, row_bytes]``, about 4 MiB at a time.

    Each piece but the last has a multiple of ``multiple`` rows, so that what belongs together stays together.

    Raises:
        BrokenArtifact: the file ends before the last row.
    """
    step = max(_PIECE_BYTES // (row_bytes * multiple), 1) * multiple
    with open_regular(path) as file:
        file.seek(start)
        for first in range(0, num_rows, step):
            rows = min(step, num_rows - first)
            data = file.read(rows * row_bytes)
            if len(data) != rows * row_bytes:
                raise BrokenArtifact(
                    path.name, "", "it became shorter while it was read.", "Import it again."
                )
            yield np.frombuffer(data, dtype=np.uint8).reshape(rows, row_bytes)


def encode(
    values: npt.NDArray[np.float32], dtype: str, *, file: str, name: str
) -> npt.NDArray[np.float32] | npt.NDArray[np.uint16]:
    """``values`` as they are stored: float32, or the 16 bits of bfloat16, rounded to nearest even.

    Raises:
        BrokenArtifact: a value is NaN or infinite, or becomes so in bfloat16.
    """
    check_finite(values, file=file, name=name)
    if dtype == "float32":
        return values
    bits = to_bfloat16(values)
    if (bits & 0x7F80 == 0x7F80).any():
        raise BrokenArtifact(
            file, name, "a value is too large for bfloat16.", "Import it with --dtype float32."
        )
    return bits


def check_chat_template(template: str | None) -> None:
    """Refuse a template that Jinja cannot parse; it is not rendered here.

    Raises:
        BrokenArtifact: it is longer than 256 KiB, or has a syntax error (with its line).
    """
    if template is None:
        return
    try:
        if len(template.encode()) > MAX_TEMPLATE_BYTES:
            raise _bad_template("", f"it is longer than {MAX_TEMPLATE_BYTES} bytes.")
        extensions = [LoopControlExtension, _GenerationTag]
        ImmutableSandboxedEnvironment(extensions=extensions).parse(template)
    except TemplateSyntaxError as error:
        raise _bad_template(f"line {error.lineno}", f"{error.message}.") from error
    except (RecursionError, UnicodeEncodeError) as error:
        raise _bad_template("", f"it cannot be parsed ({type(error).__name__}).") from error


class _GenerationTag(Extension):
    """Hugging Face's mark around what the model wrote; it prints its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_finite(
    values: npt.NDArray[np.float32] | npt.NDArray[np.float16], *, file: str, name: str
) -> None:
    """Refuse NaN and infinity: one such weight spoils every answer.

    Raises:
        BrokenArtifact: a value is not finite.
    """
    if not np.isfinite(values).all():
        raise BrokenArtifact(
            file, name, "it holds NaN or infinity.", "Import a checkpoint with finite weights."
        )


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper 16 bits of finite float32 ``values``, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Adding just under half, and one more where the kept part is odd, carries exactly when it must round up.
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The float32 values of bfloat16 ``bits``; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _bad_template(field: str, problem: str) -> BrokenArtifact:
    return BrokenArtifact("chat template", field, problem, "Mend the template.")


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
