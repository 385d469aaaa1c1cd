"""An engine for tests of the comparison: its tokens are those of the prompt, its pace and its faults as it is told."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from tests.bench.peers.runners.wire import Reply, Request, Setup, serve

TOKEN_S = {"fast": 0.0005, "slow": 0.001}


class Echo:
    """``setup.artifact`` holds the words: fast, slow, fickle, short, hang, broken."""

    def __init__(self, setup: Setup) -> None:
        self._words = setup.artifact.split()
        self.about = setup.artifact
        if "broken" in self._words:
            sys.exit("no such weights")

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        """One after another, in the time that it says it took."""
        if "hang" in self._words:
            time.sleep(60)
        replies, now_s = [], 0.0
        for each in requests:
            reply = Reply()
            for number in range(each.num_tokens - ("short" in self._words)):
                now_s += TOKEN_S.get(self._words[0], 0.0)
                reply.add([self._token(each, number, len(requests))], now_s)
            replies.append(reply)
        return replies

    def _token(self, request: Request, number: int, batch: int) -> int:
        token = request.prompt[number % len(request.prompt)]
        return token + batch if "fickle" in self._words else token


if __name__ == "__main__":
    serve(Echo)
