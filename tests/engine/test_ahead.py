"""Tests of the modules that are imported while torch loads, and of the libraries that are opened before it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from adapters.models.kernels.factory import list_triton_modules
from engine.settings.import_order import first_gpu
from engine.settings.placement import DeviceLocation, read_devices
from tests.pairs import one_in, with_first

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "adapters" / "models" / "kernels" / "triton"


def said(code: str) -> list[str]:
    """Return the words that the code prints in a process that has imported nothing yet."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_what_is_imported_beside_torch_does_not_wait_for_it() -> None:
    code = (
        "import sys; from importlib import import_module; from engine.settings.import_order import OURS, TEXT;"
        "[import_module(name) for name in (TEXT, *OURS)]; print('torch' in sys.modules)"
    )
    assert said(code) == ["False"]


@pytest.mark.parametrize(("opening", "gpu", "before"), [(True, True, True), (False, True, False), (False, False, True)])
def test_beside_a_gpu_what_is_needed_later_does_not_keep_torch_waiting(opening: bool, gpu: bool, before: bool) -> None:
    code = (
        "import sys, threading; from engine.settings import import_order as ahead;"
        "from engine.settings.preload import OPENING;"
        "over = threading.Event(); thread = threading.Thread(target=over.wait, name=OPENING);"
        f"thread.start() if {opening} else None; ahead.open_gpu = ahead.has_triton = lambda *_: None;"
        f"ahead.gpu_driver = lambda: 'driver' if {gpu} else None; ahead.import_beside_torch([], 3); over.set();"
        "print(ahead.TEXT in sys.modules, *{name in sys.modules for name in ahead.OURS})"
    )
    assert said(code) == ["True", str(before)]


def test_what_is_written_in_triton_is_imported_without_torch() -> None:
    names = [*list_triton_modules()]
    assert "adapters.models.kernels.triton.hopper.hopper_products" in names
    files = (path.relative_to(ROOT).with_suffix("") for path in KERNELS.rglob("*.py"))
    modules = {".".join(file.parts).removesuffix(".__init__") for file in files}
    assert modules == {*names, "adapters.models.kernels.triton"}
    pytest.importorskip("triton", reason="comes with CUDA builds of torch")
    code = (
        "import sys; from importlib import import_module; from engine.settings.import_order import list_triton_modules;"
        "[import_module(name) for name in list_triton_modules()]; print('torch' in sys.modules)"
    )
    assert said(code) == ["False"]


def test_until_torch_is_imported_no_library_is_left_to_open_and_nothing_to_look_up() -> None:
    """The linker does one at a time: either would wait for torch's, and keep the interpreter from others."""
    code = (
        "import sys; from importlib import import_module; from engine.settings.preload import SMALL;"
        "import engine.__main__; [import_module(name) for name in SMALL]; before = set(sys.modules);"
        "sys.addaudithook(lambda event, args: event.startswith('ctypes.dl') and print(event, *args));"
        "import engine.commands; from engine.settings import preflight, paths;"
        "from engine.settings.output import start_progress;"
        "from engine.settings.options import build_options; options = preflight.prepare_options(build_options(port=0));"
        "preflight.check_address(options.http); import engine.settings.import_order;"
        "engine.settings.import_order.import_beside_torch(paths.list_weight_folders(options), 0);"
        "[import_module(name) for name in engine.settings.import_order.OURS];"
        "from engine.loading.load_text import begin_text; begin_text(options.model).result();"
        "print(*(name for name in sys.modules if name not in before"
        " and str(getattr(sys.modules[name], '__file__', None)).endswith('.so')))"
    )
    assert said(code) == []


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which libraries a process has")
def test_torchs_libraries_are_opened_without_it_and_it_works_with_them() -> None:
    code = (
        "import sys; from pathlib import Path; from engine.settings.preload import open_torch; open_torch();"
        "print('libtorch_cpu.so' in Path('/proc/self/maps').read_text(), 'torch' in sys.modules);"
        "import torch; print(int(torch.ones(3, 3).matmul(torch.ones(3, 3)).sum()))"
    )
    assert said(code) == ["True", "False", "27"]


@one_in(2, "words")
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which libraries a process has")
@pytest.mark.parametrize("words", ["serve", "serve --port none", "serve --help", "chat", ""])
def test_a_server_has_them_opened_beside_all_else(words: str) -> None:
    code = (
        "import gc, threading; from pathlib import Path\n"
        "from engine.settings.preload import OPENING, preload_libraries\n"
        f"with preload_libraries({words.split()}): print(gc.isenabled())\n"
        "[one.join() for one in threading.enumerate() if one.name == OPENING]\n"
        "print('libtorch_cpu.so' in Path('/proc/self/maps').read_text(), gc.isenabled())"
    )
    begins = words in {"serve", "serve --port none"}
    assert said(code) == [str(not begins), str(begins), "True"]


@with_first("words")
@pytest.mark.parametrize(("words", "status"), [("serve --port none", 2), ("serve --help", 0), ("--version", 0)])
def test_who_is_refused_a_server_leaves_with_the_status_that_says_so(words: str, status: int) -> None:
    command = [sys.executable, "-m", "engine", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert ("port" in done.stderr, done.stderr.count("\n")) == ((True, 1) if status else (False, 0))


def test_the_first_gpu_is_known_without_asking_for_it() -> None:
    asked = {"auto": 0, "cuda": 0, "cuda:2": 2, "cpu": None}
    assert {name: first_gpu([DeviceLocation(name, name)]) for name in asked} == asked
    assert first_gpu(read_devices("cpu:0,ipc+cuda:1,cuda:3,cuda:0")) == 3


# By default every server that a test starts in full goes this way, with weights.
@pytest.mark.long
def test_neither_weights_nor_a_gpu_have_to_be_there() -> None:
    code = (
        "from pathlib import Path; from engine.settings.import_order import import_beside_torch;"
        "import_beside_torch([Path('none')], 99); import torch; print(int(torch.ones(3).sum()))"
    )
    assert said(code) == ["3"]
