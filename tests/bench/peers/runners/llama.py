"""llama.cpp's library with a loop of our own around it, because its server is in no wheel.

Each pass of the loop decodes one token of every running sequence and fills the batch with prompts; the highest logit
is found by numpy. Two bindings are served: ``llama_cpp`` (llama-cpp-python) and ``llama_cpp_py_sync``.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.bench.peers.runners.wire import Reply, Request, Setup, serve

STEP_TOKENS = 512


class CtypesBinding:
    """llama-cpp-python."""

    def __init__(self) -> None:
        self.api: Any = importlib.import_module("llama_cpp.llama_cpp")
        package: Any = importlib.import_module("llama_cpp")
        self.name = f"llama-cpp-python {package.__version__}, compiled here"
        self._numpy: Any = importlib.import_module("numpy")

    def row(self, pointer: Any, length: int) -> Any:
        """A row of logits as an array."""
        return self._numpy.ctypeslib.as_array(pointer, shape=(length,))

    def text(self, pointer: Any) -> str:
        """A C string."""
        return bytes(pointer).decode()


class CffiBinding:
    """llama-cpp-py-sync."""

    def __init__(self) -> None:
        module: Any = importlib.import_module("llama_cpp_py_sync._cffi_bindings")
        package: Any = importlib.import_module("llama_cpp_py_sync")
        self.api: Any = module.get_lib()
        self._ffi: Any = module.get_ffi()
        self.name = f"llama.cpp {package.__llama_cpp_tag__} (llama-cpp-py-sync)"
        self._numpy: Any = importlib.import_module("numpy")

    def row(self, pointer: Any, length: int) -> Any:
        """A row of logits as an array."""
        return self._numpy.frombuffer(self._ffi.buffer(pointer, 4 * length), self._numpy.float32)

    def text(self, pointer: Any) -> str:
        """A C string."""
        return bytes(self._ffi.string(pointer)).decode()


@dataclass(slots=True)
class Running:
    """A request that runs: what is fed next, and where."""

    number: int
    request: Request
    reply: Reply = field(default_factory=Reply)
    position: int = 0
    row: int = -1

    @property
    def pending(self) -> list[int]:
        """Tokens that are not in the cache yet."""
        known = self.request.prompt + self.reply.token_ids
        return known[self.position :]

    @property
    def is_finished(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.reply.token_ids) == self.request.num_tokens


class Llama:
    """One model and one context with a sequence for each request."""

    def __init__(self, setup: Setup) -> None:
        is_compiled = importlib.util.find_spec("llama_cpp") is not None
        self._binding = CtypesBinding() if is_compiled else CffiBinding()
        api = self._binding.api
        api.llama_backend_init()
        path, model_params = setup.gguf.encode(), api.llama_model_default_params()
        self._model = api.llama_model_load_from_file(path, model_params)
        params = api.llama_context_default_params()
        params.n_ctx = setup.num_requests * (setup.max_tokens + 32)
        params.n_batch = params.n_ubatch = STEP_TOKENS
        params.n_seq_max = setup.num_requests
        params.n_threads = params.n_threads_batch = setup.num_threads
        params.no_perf = True
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp has not made a context")
        self._num_logits = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(STEP_TOKENS, 0, 1)
        features = self._binding.text(api.llama_print_system_info())
        used = [name for name in ("AVX512_VNNI", "AVX512", "AVX2") if f"{name} = 1" in features]
        self.about = f"{self._binding.name}, {used[0] if used else 'no AVX'}"

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        """As ``Engine.run``."""
        api = self._binding.api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        running = [Running(number, each) for number, each in enumerate(requests)]
        replies = [each.reply for each in running]
        started_at = time.perf_counter()
        while running:
            self._fill(running)
            if code := api.llama_decode(self._context, self._batch):
                raise RuntimeError(f"llama_decode answers {code}")
            for each in running:
                if each.row >= 0:
                    logits = api.llama_get_logits_ith(self._context, each.row)
                    token = int(self._binding.row(logits, self._num_logits).argmax())
                    each.reply.add([token], time.perf_counter() - started_at)
            running = [each for each in running if not each.is_finished]
        return replies

    def _fill(self, running: Sequence[Running]) -> None:
        """Those with one token to go first, then prompts, up to a full batch."""
        self._batch.n_tokens = 0
        for each in sorted(running, key=lambda one: len(one.pending) > 1):
            each.row = -1
            pending = each.pending
            fed = pending[: STEP_TOKENS - self._batch.n_tokens]
            for token in fed:
                self._put(token, each)
            if fed and len(fed) == len(pending):
                each.row = self._batch.n_tokens - 1
                self._batch.logits[each.row] = 1

    def _put(self, token: int, sequence: Running) -> None:
        batch, at = self._batch, self._batch.n_tokens
        batch.token[at] = token
        batch.pos[at] = sequence.position
        batch.n_seq_id[at] = 1
        batch.seq_id[at][0] = sequence.number
        batch.logits[at] = 0
        batch.n_tokens += 1
        sequence.position += 1


if __name__ == "__main__":
    serve(Llama)
