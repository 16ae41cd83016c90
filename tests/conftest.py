"""Read by JAX when it is imported: eight virtual CPU devices, and no silent broadcast between unequal
ranks.
"""

import gc
import importlib
import inspect
import os
import shutil
import signal
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest
from beartype import beartype
from jaxtyping import jaxtyped

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# Programs of tests take longer to compile than to run, half of it by the compiler of fusions (later versions
# have no other); without optimisation jaxlib 0.12 computes a step on eight devices that is 1e-3 off.
if tuple(map(int, version("jaxlib").split(".")[:3])) <= (0, 10, 2):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# libtpu, which compiles without a TPU
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # where each operation was called: nobody reads it here

# What a module or process of the tests has compiled, another does not compile again, nor do the next tests.
# The folder is pytest's: ``pytest --cache-clear`` deletes it.
COMPILED = Path(__file__).parents[1] / ".pytest_cache/d/compiled"
MAX_COMPILED_BYTES = 10**9  # all tests compile 60 MB
IS_FIRST_PROCESS = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if IS_FIRST_PROCESS:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(COMPILED)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.02"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

gc.set_threshold(100_000, 50, 100)  # tracing makes many objects, and none of them is garbage
os.fsync = lambda file: None  # no test cuts the power, and a disk may take long

# A shell that starts tests in the background has them ignore what some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


UNCHECKED = ("make_mixer",)  # returns a protocol, of which Python cannot tell instances


def check_annotations(*names):
    """Check calls of the public functions and methods of modules against their annotations, shapes included.

    Called before other modules import these functions by name, so modules come after those they import.
    """
    nnx = importlib.import_module("flax.nnx")  # only now: jax reads the environment above
    for name in names:
        module = importlib.import_module(f"lm.{name}")
        for attribute, value in list(vars(module).items()):
            if getattr(value, "__module__", None) != module.__name__ or attribute[0] == "_":
                continue
            if inspect.isfunction(value) and attribute not in UNCHECKED:
                setattr(module, attribute, jaxtyped(value, typechecker=beartype))
            elif inspect.isclass(value) and issubclass(value, nnx.Module):
                check_methods(value)


def check_methods(cls):
    """Check calls of the public methods of a class, and of the class's instances."""
    for attribute, value in list(vars(cls).items()):
        is_public = attribute == "__call__" or attribute[0] != "_"
        if inspect.isfunction(value) and is_public:
            setattr(cls, attribute, jaxtyped(value, typechecker=beartype))


OPS = ("attention", "experts", "losses", "masks", "positions", "recurrence")
NN = (
    "dropout layers costs cache positions attention_dispatch attention_inputs attention alignment rnn mixers "
    "mlp lora block stack heads transformer electra elmo ensemble finetune"
).split()
check_annotations(*(f"ops.{name}" for name in OPS), *(f"nn.{name}" for name in NN))

# Modules of few tests that take long: begun first, so that no worker is left alone with one at the end.
LONGEST = [
    "run",
    "stages",
    "jobs",
    "count_stages",
    "processes",
    "batches",
    "notebook",
    "vector_stages",
    "figures",
]


def pytest_collection_modifyitems(items):
    """With ``--no-loadscope-reorder`` workers take modules in this order."""
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_unconfigure():
    """Delete compiled programs once they are too many: each change of the code leaves those from before."""
    gc.freeze()  # pytest collects garbage five times at its end
    with suppress(FileNotFoundError):  # other tests, which run at the same time, may delete them
        if IS_FIRST_PROCESS and sum(file.stat().st_size for file in COMPILED.iterdir()) > MAX_COMPILED_BYTES:
            shutil.rmtree(COMPILED)


MAPS = 35_000  # pieces of memory that a process may have mapped when a module begins


@pytest.fixture(autouse=True, scope="module")
def _programs_of_a_module():
    """Compiled programs go with a module once they are many: each maps memory, of which Linux lets a process
    have 65,530 pieces, and the one that asks for more is aborted. The next modules use what is left.
    """
    yield
    import jax

    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > MAPS:
        jax.clear_caches()
