"""transformers' continuous batching with its paged SDPA attention, bf16."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

from tests.bench.peers.runners.wire import Reply, Request, Setup, serve

PATIENCE_S = 120


class Transformers:
    """One model."""

    def __init__(self, setup: Setup) -> None:
        torch: Any = importlib.import_module("torch")
        self._transformers: Any = importlib.import_module("transformers")
        torch.set_num_threads(setup.num_threads)
        self._model = self._transformers.AutoModelForCausalLM.from_pretrained(
            setup.huggingface, dtype=torch.bfloat16, attn_implementation="paged|sdpa"
        ).eval()
        self.about = (
            f"transformers {self._transformers.__version__}, torch {torch.__version__}, bf16"
        )

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        """As ``Engine.run``; it tells when an answer is whole, so its TTFT is not known and counts as its latency."""
        generation = self._transformers.GenerationConfig(
            max_new_tokens=max(each.num_tokens for each in requests),
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        manager = self._model.init_continuous_batching(generation_config=generation)
        manager.start()
        started_at = time.perf_counter()
        names = [
            manager.add_request(each.prompt, max_new_tokens=each.num_tokens) for each in requests
        ]
        replies: dict[str, Reply] = {name: Reply() for name in names}
        num_left = len(names)
        while num_left:
            result = manager.get_result(timeout=PATIENCE_S)
            if result is None:
                raise TimeoutError(f"no answer within {PATIENCE_S} s")
            if result.is_finished():
                tokens = [int(token) for token in result.generated_tokens]
                replies[result.request_id].add(tokens, time.perf_counter() - started_at)
                num_left -= 1
        manager.stop(block=True)
        return list(replies.values())


if __name__ == "__main__":
    serve(Transformers)
