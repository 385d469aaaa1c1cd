#!/usr/bin/env python
"""Commands of the control plane, with the environment of the home they work on."""

from __future__ import annotations

import os
import sys

from django.core.management import execute_from_command_line

from controlplane.console.home import Home


def main() -> None:
    """Run one command: ``python manage.py help`` lists them."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings.control")
    Home.of_environment(os.environ).fill_environment(os.environ)
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
