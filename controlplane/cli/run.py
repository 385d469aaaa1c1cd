"""What `make run` wrote down about an installation: addresses, credentials, logs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self


class CommandFailed(Exception):
    """The command cannot do what was asked; the message is all there is to say."""


@dataclass(frozen=True, slots=True)
class Run:
    """What ``run.json`` of an installation says."""

    gateway_url: str
    control_url: str
    api_key: str
    control_token: str
    admin_user: str
    admin_password: str
    endpoint: str
    logs: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """The run at ``path``.

        Raises:
            CommandFailed: there is none, or it is damaged.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{name: str(data[name]) for name in cls.__dataclass_fields__})
        except FileNotFoundError as error:
            raise CommandFailed(
                f"{path} is not there. Start with `make run`, or name the file with --run."
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise CommandFailed(
                f"{path} is damaged ({error!r}); `make run` writes it anew."
            ) from error
