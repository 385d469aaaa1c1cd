"""The kernels touch only what is theirs: compiled with the sanitizers, they run models of awkward shapes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from inference.kernels import loader

pytestmark = pytest.mark.slow

DRIVER = Path(__file__).with_name("sanitizer_driver.cpp")
SOURCES = Path(loader.__file__).parent
NO_INSTRUCTIONS = 77


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_sanitizers_find_nothing(tmp_path: Path, sanitizers: str) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "driver"
    flags = f"-std=c++17 -O1 -g -ffp-contract=off -pthread -fsanitize={sanitizers}"
    command = [compiler, *flags.split(), "-fno-sanitize-recover=all", f"-I{SOURCES}"]
    sources = [str(DRIVER), *map(str, sorted(SOURCES.glob("*.cpp")))]
    built = subprocess.run(
        [*command, *sources, "-o", str(program)], capture_output=True, text=True, timeout=300
    )
    if "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no sanitizer libraries: {built.stderr[-200:]}")
    assert built.returncode == 0, built.stderr[-3000:]
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    if done.returncode == NO_INSTRUCTIONS:
        pytest.skip("the CPU lacks AVX512-VNNI")
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer cannot run under this kernel")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "done\n"
