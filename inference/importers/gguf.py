"""GGUF files of the Llama architecture -> our artifact.

llama.cpp stores the rows of the query and key projections in another order than Hugging Face, because its rotary
embedding turns neighbouring pairs and Hugging Face's the two halves of a head. Here the order is undone. Blocks of
quantised values lie within rows, so moving rows loses nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inference.artifact import (
    BrokenArtifact,
    Contents,
    NewTensor,
    Progress,
    no_progress,
    open_regular,
    write_artifact,
)
from inference.config import ModelConfig
from inference.importers.checkpoint import (
    EMBEDDING,
    HEAD,
    STORED_DTYPES,
    check_chat_template,
    check_finite,
    check_limits,
    check_tensors,
    check_tokenizer,
    count_parameters,
    encode,
    from_bfloat16,
    read_rows,
    with_end_of_turn,
)
from inference.importers.gguf_config import ROPE_FACTORS, read_chat_template, read_config
from inference.importers.gguf_file import GgufHeader, GgufTensor, read_header
from inference.importers.tokenizer import build_tokenizer
from inference.quantization import SCHEMES
from inference.quantization.int4 import pack

Parts = dict[str, npt.NDArray[Any]]

_NAMES = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_BLOCK = re.compile(r"blk\.(?P<index>0|[1-9][0-9]{0,5})\.(?P<rest>.+)")
_PERMUTED = ("attn_q.weight", "attn_k.weight")
_SCHEME_OF = {"Q4_0": "int4", "Q4_1": "int4", "Q8_0": "int8"}


def import_gguf(
    path: Path,
    root: Path,
    *,
    dtype: str = "bfloat16",
    keep_quantized: bool = False,
    progress: Progress = no_progress,
) -> Path:
    """The artifact under ``root`` made of the GGUF file at ``path``.

    ``keep_quantized`` keeps Q4_0, Q4_1 and Q8_0 blocks as they are, in our layout, and everything else in float32:
    nothing is rounded. Otherwise every weight is dequantised and stored in ``dtype``.

    Raises:
        BrokenArtifact: the file is damaged, or holds a model, tensor type or tokenizer that is not supported.
    """
    header = read_header(path)
    progress(0, len(header.tensors), "header read")
    config = read_config(path, header)
    check_limits(path.name, config)
    tokenizer = build_tokenizer(header.metadata, path.name)
    template = read_chat_template(path, header)
    check_chat_template(template)
    eos_ids = with_end_of_turn(config.eos_token_ids, tokenizer, template)
    config = replace(config, eos_token_ids=eos_ids)
    check_tokenizer(path.name, tokenizer, config)
    tensors = [
        stored
        for name, tensor in _name_tensors(path, header, config).items()
        for stored in _to_store(path, name, tensor, config, dtype, keep_quantized)
    ]
    contents = Contents(
        model=config,
        tensors=tensors,
        tokenizer=tokenizer.to_str(),
        chat_template=template,
        quantization=_narrowest_scheme(tensors),
        stored_dtype="float32" if keep_quantized else dtype,
        num_parameters=count_parameters(config),
        source=_source(path, header.metadata),
    )
    return write_artifact(root, contents, progress)


def _name_tensors(path: Path, header: GgufHeader, config: ModelConfig) -> dict[str, GgufTensor]:
    """The weights by Hugging Face's names, complete and of the right shapes."""
    named: dict[str, GgufTensor] = {}
    for name, tensor in header.tensors.items():
        if name == ROPE_FACTORS:
            continue
        known = _hugging_face_name(name)
        if known is None:
            raise BrokenArtifact(
                path.name,
                name,
                "a Llama model has no such tensor.",
                "Import a checkpoint without it (no adapters, biases or experts).",
                code="unsupported_model",
            )
        named[known] = tensor
    check_tensors(path.name, {name: tensor.shape for name, tensor in named.items()}, config)
    return named


def _hugging_face_name(name: str) -> str | None:
    block = _BLOCK.fullmatch(name)
    if block is None:
        return _NAMES.get(name)
    rest = _LAYER_NAMES.get(block["rest"])
    return rest and f"model.layers.{block['index']}.{rest}"


def _narrowest_scheme(tensors: list[NewTensor]) -> str:
    used = {tensor.name.rpartition(".")[2] for tensor in tensors}
    return next((name for name in SCHEMES if name in used), "none")


def _to_store(
    path: Path,
    name: str,
    tensor: GgufTensor,
    config: ModelConfig,
    dtype: str,
    keep_quantized: bool,
) -> list[NewTensor]:
    head_dim = config.head_dim if tensor.name.endswith(_PERMUTED) else None
    decoded = partial(_decoded_pieces, path, tensor, head_dim)
    if keep_quantized and tensor.type.name in _SCHEME_OF and len(tensor.shape) == 2:
        return _store_quantised(name, tensor, decoded)
    dtype = "float32" if keep_quantized else dtype

    def read() -> Iterator[npt.NDArray[Any]]:
        for parts in decoded():
            yield encode(_values(parts), dtype, file=path.name, name=tensor.name)

    return [NewTensor(name, STORED_DTYPES[dtype], tensor.shape, read)]


def _store_quantised(
    name: str, tensor: GgufTensor, decoded: Callable[[], Iterator[Parts]]
) -> list[NewTensor]:
    scheme = SCHEMES[_SCHEME_OF[tensor.type.name]]
    num_rows, num_columns = tensor.shape

    def read(part: str) -> Iterator[npt.NDArray[Any]]:
        return (parts[part] for parts in decoded())

    def columns(part: str) -> int:
        if part == scheme.name:
            return num_columns // scheme.num_codes_per_item
        return num_columns // tensor.type.block_values

    return [
        NewTensor(f"{name}.{part}", part_dtype, (num_rows, columns(part)), partial(read, part))
        for part, part_dtype in scheme.parts.items()
    ]


def _decoded_pieces(path: Path, tensor: GgufTensor, head_dim: int | None) -> Iterator[Parts]:
    """The tensor's parts, in pieces of whole rows, rows in Hugging Face's order."""
    for rows in _read_rows(path, tensor, multiple=head_dim or 1):
        parts = _DECODERS[tensor.type.name](rows)
        for values in parts.values():
            if values.dtype.kind == "f":
                check_finite(values, file=path.name, name=tensor.name)
        yield {name: _undo_permutation(values, head_dim) for name, values in parts.items()}


def _read_rows(
    path: Path, tensor: GgufTensor, *, multiple: int = 1
) -> Iterator[npt.NDArray[np.uint8]]:
    num_rows = tensor.num_bytes // tensor.row_bytes
    return read_rows(path, tensor.start, num_rows, tensor.row_bytes, multiple=multiple)


def _undo_permutation(rows: npt.NDArray[Any], head_dim: int | None) -> npt.NDArray[Any]:
    """Rows of whole heads from llama.cpp's order (pairs side by side) to Hugging Face's (two halves).

    Source: ``LlamaModel.permute`` in llama.cpp's ``convert_hf_to_gguf.py``, inverted.
    """
    if head_dim is None:
        return rows
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])  # [heads, pair, half, columns]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _values(parts: Parts) -> npt.NDArray[np.float32]:
    """Float32 weights of decoded ``parts``, which are plain values or the parts of a scheme."""
    if "values" in parts:
        return parts["values"]
    scheme = next(scheme for name, scheme in SCHEMES.items() if name in parts)
    return scheme.dequantize(*parts.values())


def _decode_f32(rows: npt.NDArray[np.uint8]) -> Parts:
    return {"values": rows.view("<f4")}


def _decode_f16(rows: npt.NDArray[np.uint8]) -> Parts:
    return {"values": rows.view("<f2").astype(np.float32)}


def _decode_bf16(rows: npt.NDArray[np.uint8]) -> Parts:
    return {"values": from_bfloat16(rows.view("<u2"))}


def _decode_q8_0(rows: npt.NDArray[np.uint8]) -> Parts:
    blocks = rows.reshape(len(rows), -1, 34)  # [rows, blocks, scale and 32 codes]
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return {"int8": codes.reshape(len(rows), -1), "scale": _float16(blocks, 0)}


def _decode_q4_1(rows: npt.NDArray[np.uint8]) -> Parts:
    blocks = rows.reshape(len(rows), -1, 20)  # [rows, blocks, scale, minimum and 32 nibbles]
    return {
        "int4": _repack(blocks[..., 4:]),
        "scale": _float16(blocks, 0),
        "minimum": _float16(blocks, 2),
    }


def _decode_q4_0(rows: npt.NDArray[np.uint8]) -> Parts:
    blocks = rows.reshape(len(rows), -1, 18)  # [rows, blocks, scale and 32 nibbles]
    scale = _float16(blocks, 0)
    # (code - 8) * scale = code * scale + minimum. Times 8 is exact in float16 unless it overflows, which the check
    # for finite values then refuses.
    with np.errstate(over="ignore"):
        minimum = scale * np.float16(-8)
    return {"int4": _repack(blocks[..., 2:]), "scale": scale, "minimum": minimum}


def _float16(blocks: npt.NDArray[np.uint8], offset: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., offset : offset + 2]).view("<f2")[..., 0]


def _repack(nibbles: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """GGUF keeps column ``j`` low and ``j + 16`` high, our layout neighbours: ``[rows, blocks, 16]`` in."""
    codes = np.concatenate([nibbles & 0x0F, nibbles >> 4], axis=-1)  # [rows, blocks, 32]
    return pack(codes.reshape(len(nibbles), -1))


_DECODERS: Mapping[str, Callable[[npt.NDArray[np.uint8]], Parts]] = {
    "F32": _decode_f32,
    "F16": _decode_f16,
    "BF16": _decode_bf16,
    "Q8_0": _decode_q8_0,
    "Q4_1": _decode_q4_1,
    "Q4_0": _decode_q4_0,
}


def _source(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    told = {"title": metadata.get("general.name"), "license": metadata.get("general.license")}
    return {"format": "gguf", "name": path.name, "sha256": digest} | {
        key: value for key, value in told.items() if isinstance(value, str)
    }
