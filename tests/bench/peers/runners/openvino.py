"""OpenVINO GenAI's continuous batching, which reads the GGUF itself."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

from tests.bench.peers.runners.wire import Reply, Request, Setup, serve

CACHE_GB = 1
STEP_TOKENS = 512


class OpenVino:
    """One pipeline."""

    def __init__(self, setup: Setup) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        self._numpy: Any = importlib.import_module("numpy")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = STEP_TOKENS
        scheduler.max_num_seqs = setup.num_requests
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": setup.num_threads}
        self._pipeline = self._genai.ContinuousBatchingPipeline(
            setup.gguf, scheduler, "CPU", properties
        )
        self._num_sent = 0
        self.about = f"OpenVINO GenAI {self._genai.__version__}, the GGUF's own 4 and 8 bits"

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        """As ``Engine.run``."""
        started_at = time.perf_counter()
        handles = [self._add(each) for each in requests]
        replies = [Reply() for _ in requests]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now_s = time.perf_counter() - started_at
            for handle, reply in zip(handles, replies, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        reply.add([int(token) for token in output.generated_ids], now_s)
        return replies

    def _add(self, request: Request) -> Any:
        generation = self._genai.GenerationConfig()
        generation.max_new_tokens = request.num_tokens
        generation.ignore_eos = True
        generation.do_sample = False
        prompt = self._numpy.array([request.prompt], dtype=self._numpy.int64)
        self._num_sent += 1
        return self._pipeline.add_request(self._num_sent, self._openvino.Tensor(prompt), generation)


if __name__ == "__main__":
    serve(OpenVino)
