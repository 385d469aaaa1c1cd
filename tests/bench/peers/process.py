"""An engine in a process of its own that answers over its standard input and output."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from tests.bench.peers.environments import PeerUnavailable
from tests.bench.peers.runners.wire import Reply, Request, Setup
from tests.bench.traffic import Answer, Asked
from tests.bench.weights import HOME, ROOT

LOAD_S = 600  # vLLM compiles for a minute or more
RUN_S = 600
END_S = 10


class EngineProcess:
    """Started and loaded; leaving the context ends it."""

    def __init__(self, name: str, python: Path, module: str, setup: Setup) -> None:
        self.name = name
        self.log = HOME / "logs" / f"{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", module],
                cwd=ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._reader = ThreadPoolExecutor(1)
        try:
            self.about = str(self._ask(asdict(setup), LOAD_S)["about"])
        except PeerUnavailable:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, asked: Sequence[Asked]) -> list[Answer]:
        """Send all at once; the answers in order.

        Raises:
            PeerUnavailable: it died, hangs, or gave other numbers of tokens than it was asked for.
        """
        requests = [asdict(Request(list(each.prompt), each.num_tokens)) for each in asked]
        replies = [Reply(**reply) for reply in self._ask(requests, RUN_S)]
        lengths = [
            (each.num_tokens, len(reply.token_ids))
            for each, reply in zip(asked, replies, strict=True)
        ]
        if wrong := [pair for pair in lengths if pair[0] != pair[1]]:
            raise PeerUnavailable(
                f"{self.name} was asked for {wrong[0][0]} tokens and gave {wrong[0][1]}"
            )
        return [Answer(0.0, reply.token_ids, reply.first_s, reply.last_s) for reply in replies]

    def close(self) -> None:
        """End it, gently first."""
        if self._process.stdin is not None and self._process.poll() is None:
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
        self._reader.shutdown()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _ask(self, message: Any, limit_s: float) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise ValueError("The process has no pipes.")
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
            line = self._reader.submit(stdout.readline).result(limit_s)
        except BrokenPipeError:
            line = ""
        except TimeoutError as error:
            self._process.kill()
            raise PeerUnavailable(f"no answer within {limit_s:.0f} s; {self.log}") from error
        if not line:
            raise PeerUnavailable(f"it ended: {self._last_words()} ({self.log})")
        return json.loads(line)

    def _last_words(self) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace").strip()
        return text.splitlines()[-1][:200] if text else "without a word"
