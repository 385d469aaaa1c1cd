"""vLLM's CPU build, bf16: it reads neither the GGUF's weights nor any other 4 bits on a CPU as they are."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from tests.bench.peers.runners.wire import Reply, Request, Setup, serve

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
}


class Vllm:
    """One model in this process."""

    def __init__(self, setup: Setup) -> None:
        cores = sorted(os.sched_getaffinity(0))[: setup.num_threads]
        os.environ.update(ENVIRONMENT)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        self._vllm: Any = importlib.import_module("vllm")
        self._model = self._vllm.LLM(
            model=setup.huggingface,
            dtype="bfloat16",
            max_model_len=setup.max_tokens,
            max_num_seqs=setup.num_requests,
            enable_prefix_caching=False,
            disable_log_stats=False,
        )
        self.about = f"vLLM {self._vllm.__version__}, bf16"

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        """As ``Engine.run``; the times are those that vLLM notes itself."""
        samplings = [self._sampling(each.num_tokens) for each in requests]
        prompts = [{"prompt_token_ids": each.prompt} for each in requests]
        outputs = self._model.generate(prompts, samplings, use_tqdm=False)
        return [_reply(output) for output in outputs]

    def _sampling(self, num_tokens: int) -> Any:
        return self._vllm.SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            min_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
        )


def _reply(output: Any) -> Reply:
    metrics = output.metrics
    first_s = metrics.first_token_latency
    last_s = first_s + metrics.last_token_ts - metrics.first_token_ts
    return Reply(list(output.outputs[0].token_ids), first_s, last_s)


if __name__ == "__main__":
    serve(Vllm)
